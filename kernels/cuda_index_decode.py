"""Index scores of decode rows in CUDA C++ for Hopper (sm_90a), over paged index K (spec 2.6).

    block_maxima(q bf16 [n, heads, 128], weights bf16 [n, heads], cache uint8 [pages, 64 * 68],
                 req_to_token int [requests, context], requests int [n], visible int [n], ratio, width, skip, group)
        -> Maxima(blocks fp32 [n, width / 8], tiles fp32 [n, width / 64])
    index_scores_candidates(..., visible, ratio, blocks int32 [n, b], skip)
        -> (fp32 [n, b * 8], their maxima per block fp32 [n, b])

The contract and the roundings of `triton_index_scores.py`, for up to 32 heads; a row with visible <= skip is not
touched. Sums over heads run in another order, so that scores differ from Triton's by fp32 rounding; a scan and a list
give a key the same bits. Where a row's last page or block ends within 16 bytes of scales, those 16 bytes are read.

A scan's rows may come in sets of `group` (1 to 6) rows of one request, such as the tokens of a draft that is verified:
a set's keys are fetched and decoded once. Scores are the same bits as those of rows on their own.

How it works is told in `csrc/index_scores_decode.cu`. One launch each, whose grid follows from host numbers only, and
no scratch. The source is built with nvcc at first use (cuda_build.py).
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from sglang_csa2.kernels import cuda_build
from sglang_csa2.kernels.cuda_index_scores import INDEX_TENSORS, check_places, index_arguments
from sglang_csa2.kernels.triton_index_scores import (
    BLOCK_ENTRIES,
    TILE_ENTRIES,
    Maxima,
    check_listed,
    check_tensors,
    room_for_maxima,
)
from sglang_csa2.kernels.triton_records import INT_TYPES, check_rows

SOURCE = cuda_build.SOURCES / "index_scores_decode.cu"
# Columns of a product, and what shared memory holds of queries.
MAX_HEADS = 32
MAX_GROUP = 6


def block_maxima(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    req_to_token: Tensor,
    requests: Tensor,
    visible: Tensor,
    ratio: int,
    width: int,
    *,
    skip: int = 0,
    group: int = 1,
) -> Maxima:
    rows = _check(q, weights, cache, req_to_token, requests, visible, ratio)
    if not 1 <= group <= MAX_GROUP or rows % group:
        raise ValueError(f"group is {group} for {rows} rows: it must divide them, and at most {MAX_GROUP} are served")
    maxima = room_for_maxima(rows, width, q.device)
    grid = _grid(rows // group * (width // TILE_ENTRIES), q.device)
    if grid:
        with torch.cuda.device(q.device):
            tensors = (q, weights, cache, req_to_token, requests, visible)
            status = call_block_maxima(library(), tensors, ratio, width, skip, group, maxima, grid, cuda_build.stream())
        if status:
            raise RuntimeError(f"block_maxima did not launch for {rows} rows of {width}: CUDA error {status}")
    return maxima


def index_scores_candidates(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    req_to_token: Tensor,
    requests: Tensor,
    visible: Tensor,
    ratio: int,
    blocks: Tensor,
    *,
    skip: int = -1,
) -> tuple[Tensor, Tensor]:
    rows = _check(q, weights, cache, req_to_token, requests, visible, ratio)
    num_blocks = check_listed(blocks, rows)
    logits = torch.empty(rows, num_blocks * BLOCK_ENTRIES, dtype=torch.float32, device=q.device)
    block_max = torch.empty(rows, num_blocks, dtype=torch.float32, device=q.device)
    grid = _grid(rows * -(-num_blocks * BLOCK_ENTRIES // TILE_ENTRIES), q.device)
    if grid:
        with torch.cuda.device(q.device):
            tensors = (q, weights, cache, req_to_token, requests, visible)
            status = call_candidates(
                library(), tensors, ratio, blocks, skip, logits, block_max, grid, cuda_build.stream()
            )
        if status:
            raise RuntimeError(
                f"index_scores_candidates did not launch for {rows} rows of {num_blocks} blocks: CUDA error {status}"
            )
    return logits, block_max


def call_block_maxima(
    library: ctypes.CDLL,
    tensors: tuple[Tensor, ...],
    ratio: int,
    width: int,
    skip: int,
    group: int,
    maxima: Maxima,
    grid: int,
    stream: int,
) -> int:
    """The C interface on checked tensors, q to visible: 0, or a CUDA error."""
    return library.csa2_block_maxima(
        *_arguments(*tensors, ratio),
        skip,
        width,
        group,
        maxima.blocks.data_ptr(),
        maxima.tiles.data_ptr(),
        grid,
        cuda_build.EARLY_START,
        stream,
    )


def call_candidates(
    library: ctypes.CDLL,
    tensors: tuple[Tensor, ...],
    ratio: int,
    blocks: Tensor,
    skip: int,
    logits: Tensor,
    block_max: Tensor,
    grid: int,
    stream: int,
) -> int:
    """The same."""
    return library.csa2_index_scores_candidates(
        *_arguments(*tensors, ratio),
        skip,
        blocks.data_ptr(),
        blocks.shape[1],
        logits.data_ptr(),
        block_max.data_ptr(),
        grid,
        cuda_build.EARLY_START,
        stream,
    )


def _arguments(q, weights, cache, req_to_token, requests, visible, ratio) -> tuple:
    return *index_arguments(q, weights, cache, req_to_token, requests, visible), ratio, *q.shape[:2]


_TENSORS = [*INDEX_TENSORS, *(ctypes.c_int, ctypes.c_int, ctypes.c_int)]
# The arguments of the C interface.
FUNCTIONS = {
    "csa2_block_maxima": [
        *_TENSORS,
        *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_void_p),
    ],
    "csa2_index_scores_candidates": [
        *_TENSORS,
        *(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_void_p),
    ],
}


@functools.cache
def library() -> ctypes.CDLL:
    """The kernels, built where they are missing."""
    return cuda_build.load(SOURCE, FUNCTIONS)


def _grid(tiles: int, device: torch.device) -> int:
    """Blocks of a launch of at most so many tiles: each fills a multiprocessor."""
    return min(tiles, cuda_build.multiprocessors(device)) if tiles else 0


def _check(q, weights, cache, req_to_token, requests, visible, ratio) -> int:
    rows, heads = check_tensors(q, weights, cache, req_to_token, visible, ratio)
    check_rows("requests", requests, (rows,), INT_TYPES)
    if heads > MAX_HEADS:
        raise ValueError(
            f"{heads} index heads are more than the {MAX_HEADS} that the CUDA C++ kernels hold: use Triton's"
        )
    check_places(q, weights, cache, req_to_token, requests, visible)
    return rows
