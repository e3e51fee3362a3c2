"""The best blocks of a scan and the Top-K of listed blocks, in CUDA C++ for Hopper (sm_90a) (spec 2.6, 2.7).

    best_blocks(block_max fp32 [n, blocks], tile_max fp32 [n, blocks / 8], visible int [n], k, keep_newest)
        -> int32 [n, k] block ids
    select_in_blocks(scores fp32 [n, b * 8], block_max fp32 [n, b], blocks int32 [n, b], visible int [n], k)
        -> int32 [n, k] positions
    select_slots(the same, req_to_token int [requests, context], requests int [n], ratio)
        -> (the same, their slots int64 [n, k])

The contract of `triton_topk.py`, to the element; k is at most 2048. `select_slots` is `select_in_blocks` and
`compressed_slots` in one launch.

How it works is told in `csrc/select.cu` and `csrc/select_cluster.cuh`: a cluster of blocks per row, or one block that
may narrow by levels, where rows are many and too long for two (`choose_split`). One launch each, no scratch. The source
is built with nvcc at first use (cuda_build.py).
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from sglang_csa2.kernels import cuda_build
from sglang_csa2.kernels.triton_records import INT_TYPES, check_rows
from sglang_csa2.kernels.triton_topk import check_best_blocks, check_select

SOURCE = cuda_build.SOURCES / "select.cu"
MAX_CHOSEN = 2048
# One block per row: up to so many scores are chosen from at once, more by their groups' maxima first; at most 16,384.
DIRECT = 8192
# A cluster per row: blocks join while each has more scores than this, up to MAX_SPLIT, first as long as two blocks of
# all rows fit a multiprocessor, then one. From sweeps on one H200 at 1 to 512 rows; 16 blocks gain nothing at 1M.
SHARE, SHARE_ALONE = 4096, 2048
MAX_SPLIT = 8
# Of more rows, up to so many blocks each all the same (512 rows of 16,384 scores: 58 us, by levels 69).
MAX_SPLIT_OF_MANY = 2
# What a block of a cluster holds in registers, and all of it.
MAX_SHARE, MAX_WIDTH = 16384, 131072


def choose_split(rows: int, width: int, multiprocessors: int) -> int:
    """Blocks of the cluster of a row of `width` scores; 0 for none: one block, by levels from DIRECT scores on."""
    split, alone = 1, multiprocessors // max(rows, 1)
    while 2 * split <= min(2 * alone, MAX_SPLIT) and split * SHARE < width:
        split *= 2
    if 2 * split <= min(alone, MAX_SPLIT) and split * SHARE_ALONE < width:
        split *= 2
    if width > 2 * SHARE:
        split = max(split, MAX_SPLIT_OF_MANY)
    fits = width <= min(split * MAX_SHARE, MAX_WIDTH)
    return split if fits and (split <= MAX_SPLIT_OF_MANY or split * rows <= 2 * multiprocessors) else 0


def best_blocks(block_max: Tensor, tile_max: Tensor, visible: Tensor, k: int, *, keep_newest: bool) -> Tensor:
    rows, _ = check_best_blocks(block_max, tile_max, visible, k)
    _check(k, block_max, tile_max, visible)
    chosen = torch.empty(rows, k, dtype=torch.int32, device=block_max.device)
    if rows:
        with torch.cuda.device(block_max.device):
            status = call_best_blocks(
                library(),
                block_max,
                tile_max,
                visible,
                keep_newest,
                DIRECT,
                _split(block_max),
                chosen,
                cuda_build.stream(),
            )
        if status:
            raise RuntimeError(f"best_blocks did not launch for {tuple(block_max.shape)}, k = {k}: CUDA error {status}")
    return chosen


def select_in_blocks(scores: Tensor, block_max: Tensor, blocks: Tensor, visible: Tensor, k: int) -> Tensor:
    rows, _ = check_select(scores, block_max, blocks, visible, k)
    _check(k, scores, block_max, blocks, visible)
    return _select(rows, scores, block_max, blocks, visible, k, None)[0]


def select_slots(
    scores: Tensor,
    block_max: Tensor,
    blocks: Tensor,
    visible: Tensor,
    k: int,
    req_to_token: Tensor,
    requests: Tensor,
    ratio: int,
) -> tuple[Tensor, Tensor]:
    rows, _ = check_select(scores, block_max, blocks, visible, k)
    check_rows("req_to_token", req_to_token, (None, None), INT_TYPES)
    check_rows("requests", requests, (rows,), INT_TYPES)
    if ratio not in (1, 2):
        raise ValueError(f"ratio is {ratio}: only 1 and 2 are served")
    _check(k, scores, block_max, blocks, visible, req_to_token, requests)
    return _select(rows, scores, block_max, blocks, visible, k, (req_to_token, requests, ratio))


def _select(rows: int, scores, block_max, blocks, visible, k: int, table) -> tuple[Tensor, Tensor | None]:
    chosen = torch.empty(rows, k, dtype=torch.int32, device=scores.device)
    slots = None if table is None else torch.empty(rows, k, dtype=torch.int64, device=scores.device)
    if rows:
        with torch.cuda.device(scores.device):
            tensors = (scores, block_max, blocks, visible)
            status = call_select(library(), *tensors, DIRECT, _split(scores), chosen, slots, table, cuda_build.stream())
        if status:
            raise RuntimeError(
                f"select_in_blocks did not launch for {tuple(scores.shape)}, k = {k}: CUDA error {status}"
            )
    return chosen, slots


def call_best_blocks(
    library: ctypes.CDLL,
    block_max: Tensor,
    tile_max: Tensor,
    visible: Tensor,
    keep_newest: bool,
    direct: int,
    split: int,
    chosen: Tensor,
    stream: int,
) -> int:
    """The C interface on checked tensors: 0, or a CUDA error."""
    return library.csa2_best_blocks(
        block_max.data_ptr(),
        tile_max.data_ptr(),
        visible.data_ptr(),
        visible.dtype == torch.int64,
        *block_max.shape,
        chosen.shape[1],
        keep_newest,
        direct,
        split,
        chosen.data_ptr(),
        cuda_build.EARLY_START,
        stream,
    )


def call_select(
    library: ctypes.CDLL,
    scores: Tensor,
    block_max: Tensor,
    blocks: Tensor,
    visible: Tensor,
    direct: int,
    split: int,
    chosen: Tensor,
    slots: Tensor | None,
    table: tuple[Tensor, Tensor, int] | None,
    stream: int,
) -> int:
    """The same; `table`: req_to_token, requests and the ratio, with `slots`."""
    slot_arguments = (0, 0, 0, False, 0, False, 1)
    if slots is not None and table is not None:
        req_to_token, requests, ratio = table
        slot_arguments = (
            slots.data_ptr(),
            req_to_token.data_ptr(),
            req_to_token.stride(0),
            req_to_token.dtype == torch.int64,
            requests.data_ptr(),
            requests.dtype == torch.int64,
            ratio,
        )
    return library.csa2_select_in_blocks(
        scores.data_ptr(),
        block_max.data_ptr(),
        blocks.data_ptr(),
        visible.data_ptr(),
        visible.dtype == torch.int64,
        *blocks.shape,
        chosen.shape[1],
        direct,
        split,
        chosen.data_ptr(),
        *slot_arguments,
        cuda_build.EARLY_START,
        stream,
    )


# The arguments of the C interface.
FUNCTIONS = {
    "csa2_best_blocks": [
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        *(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p),
    ],
    "csa2_select_in_blocks": [
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int),
        *(ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p),
    ],
}


@functools.cache
def library() -> ctypes.CDLL:
    """The kernels, built where they are missing."""
    return cuda_build.load(SOURCE, FUNCTIONS)


def _split(scores: Tensor) -> int:
    """`choose_split` of rows of scores, which clusters read 16 bytes at a time."""
    rows, width = scores.shape
    if width % 4 or scores.data_ptr() % 16:
        return 0
    return choose_split(rows, width, cuda_build.multiprocessors(scores.device))


def _check(k: int, *tensors: Tensor) -> None:
    if k > MAX_CHOSEN:
        raise ValueError(f"k is {k}, more than the {MAX_CHOSEN} that the CUDA C++ kernels choose: use Triton's")
    cuda_build.check_devices(*tensors)
    cuda_build.multiprocessors(tensors[0].device)
