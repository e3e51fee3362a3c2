"""Index scores of a prefill in CUDA C++ for Hopper (sm_90a): maxima over paged index K (spec 2.6).

    block_maxima_prefill(q bf16 [n, heads, 128], weights bf16 [n, heads], cache uint8 [pages, 64 * 68],
                         req_to_token int [requests, context], request int [1], visible int [n], ratio, width, skip)
        -> Maxima(blocks fp32 [n, width / 8], tiles fp32 [n, width / 64])

The contract and the roundings of `triton_index_scores.py`, for 1 to 64 heads; a row with visible <= skip is not
touched. Sums over heads run in another order, so that scores differ from Triton's by fp32 rounding.

How it works is told in `csrc/index_scores_prefill.cu`. Two launches, whose grids follow from host numbers only, and
a scratch of 260 bytes for each of a row's heads (padded to 16, 32 or 64). The source is built with nvcc at first use
(cuda_build.py).
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_csa2.kernels import cuda_build
from sglang_csa2.kernels.triton_index_scores import Maxima, check_tensors, room_for_maxima
from sglang_csa2.kernels.triton_records import INT_TYPES, check_rows

SOURCE = cuda_build.SOURCES / "index_scores_prefill.cu"

# As the source has them.
_TILE_KEYS = 256
_COLUMNS = 128
_GROUP_BYTES = _COLUMNS * (256 + 4)
_MAX_GROUPS = 128

# Blocks per multiprocessor that a launch aims for. A block decodes its keys for all of its rows: more blocks decode
# more often, fewer leave multiprocessors idle at the end. Not swept.
_BLOCKS_PER_MULTIPROCESSOR = 16


class Tile(NamedTuple):
    """How a launch cuts its work: heads are padded to 16, 32 or 64, a group of 128 / heads rows fills a product, and a
    block scores 256 keys for 1 to 128 groups."""

    heads: int
    groups: int


def choose_tile(rows: int, heads: int, width: int, multiprocessors: int) -> Tile:
    """The tile of a launch, from host numbers only, so that a captured graph keeps it."""
    tile_heads = next(size for size in (16, 32, 64) if heads <= size)
    groups = _groups(rows, tile_heads)
    blocks = groups * -(-width // _TILE_KEYS)
    wanted = -(-blocks // (_BLOCKS_PER_MULTIPROCESSOR * multiprocessors))
    return Tile(tile_heads, max(1, min(wanted, groups, _MAX_GROUPS)))


def _groups(rows: int, tile_heads: int) -> int:
    return -(-rows // (_COLUMNS // tile_heads))


def block_maxima_prefill(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    req_to_token: Tensor,
    request: Tensor,
    visible: Tensor,
    ratio: int,
    width: int,
    *,
    skip: int = 0,
    tile: Tile | None = None,
) -> Maxima:
    rows, heads = _check(q, weights, cache, req_to_token, request, visible, ratio)
    maxima = room_for_maxima(rows, width, q.device)
    if not (rows and width):
        return maxima
    tile = tile or choose_tile(rows, heads, width, cuda_build.multiprocessors(q.device))
    image = image_for(rows, tile, q.device)
    with torch.cuda.device(q.device):
        tensors = (q, weights, cache, req_to_token, request, visible)
        status = call(library(), *tensors, image, maxima, ratio, width, skip, tile, cuda_build.stream())
    if status:
        raise RuntimeError(f"block_maxima_prefill did not launch with {tile} for {rows} x {width}: CUDA error {status}")
    return maxima


def image_for(rows: int, tile: Tile, device: torch.device) -> Tensor:
    """Scratch for the arranged queries of `rows` rows."""
    return torch.empty(_groups(rows, tile.heads), _GROUP_BYTES, dtype=torch.uint8, device=device)


def call(
    library: ctypes.CDLL,
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    req_to_token: Tensor,
    request: Tensor,
    visible: Tensor,
    image: Tensor,
    maxima: Maxima,
    ratio: int,
    width: int,
    skip: int,
    tile: Tile,
    stream: int,
) -> int:
    """The C interface on checked tensors: 0, or a CUDA error."""
    rows, heads, _ = q.shape
    return library.csa2_block_maxima_prefill(
        *index_arguments(q, weights, cache, req_to_token, request, visible),
        image.data_ptr(),
        maxima.blocks.data_ptr(),
        maxima.tiles.data_ptr(),
        rows,
        heads,
        ratio,
        width,
        skip,
        *tile,
        stream,
    )


# What the C interfaces of every index scan begin with.
INDEX_TENSORS = [
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64),
    *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_int),
    *(ctypes.c_void_p, ctypes.c_int) * 2,
]


def index_arguments(q, weights, cache, req_to_token, requests, visible) -> tuple:
    """Checked tensors as `INDEX_TENSORS`."""
    wide = torch.int64
    return (
        q.data_ptr(),
        weights.data_ptr(),
        cache.data_ptr(),
        cache.stride(0),
        req_to_token.data_ptr(),
        req_to_token.stride(0),
        req_to_token.dtype == wide,
        requests.data_ptr(),
        requests.dtype == wide,
        visible.data_ptr(),
        visible.dtype == wide,
    )


# The arguments of the C interface.
FUNCTIONS = {
    "csa2_block_maxima_prefill": [
        *INDEX_TENSORS,
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),
        *(ctypes.c_int,) * 7,
        ctypes.c_void_p,
    ]
}


@functools.cache
def library() -> ctypes.CDLL:
    """The kernel, built where it is missing."""
    return cuda_build.load(SOURCE, FUNCTIONS)


def _check(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    req_to_token: Tensor,
    request: Tensor,
    visible: Tensor,
    ratio: int,
) -> tuple[int, int]:
    rows, heads = check_tensors(q, weights, cache, req_to_token, visible, ratio)
    check_rows("request", request, (1,), INT_TYPES)
    if not 1 <= heads <= 64:
        raise ValueError(f"q has {heads} heads: 1 to 64 are served, use the Triton form")
    check_places(q, weights, cache, req_to_token, request, visible)
    return rows, heads


def check_places(q: Tensor, weights: Tensor, cache: Tensor, *others: Tensor) -> None:
    """Raise unless what is read 16 bytes at a time starts at such places, and all is on one card."""
    if q.data_ptr() % 16:
        raise ValueError(f"q must start at a multiple of 16 bytes, got {q.data_ptr():#x}: copy it first")
    if cache.data_ptr() % 16 or cache.stride(0) % 16:
        raise ValueError(
            f"cache pages must start at multiples of 16 bytes, got {cache.data_ptr():#x} and a stride of "
            f"{cache.stride(0)}: view the pool's buffer"
        )
    cuda_build.check_devices(q, weights, cache, *others)
