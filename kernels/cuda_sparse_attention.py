"""Sparse decode attention in CUDA C++ for Hopper (sm_90a) over packed SWA KV and chosen main KV (spec 2.8).

    sparse_attention(q bf16 [n, heads, 512], swa_cache uint8 [slots, 528], swa_slots int [n, window],
                     main_cache uint8 [slots, 288] | None, main_slots int [n, k] | None,
                     attn_sink fp32 [heads], scale) -> bf16 [n, heads, 512]

    s_k = scale * q . k        out = sum_k exp(s_k) k / (sum_k exp(s_k) + exp(sink))

The contract of `sparse_attention.py`: keys are values too, a slot of -1 (anywhere in a row) is no key and reads
nothing, a row without keys gives zeros, any number of heads. Products are bf16 with fp32 accumulation, scores and the
denominator fp32, P is rounded to bf16 for the product with V, as in the published code.

How it works is told in `csrc/sparse_attention.cu`. One launch, whose grid follows from host numbers only, so a CUDA
graph can hold it; no scratch. The source is built with nvcc at first use (cuda_build.py).
`triton_sparse_attention.py` is the portable form.
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_csa2.kernels import cuda_build
from sglang_csa2.kernels.triton_sparse_attention import check_tensors
from sglang_csa2.layout import SWA_KV

SOURCE = cuda_build.SOURCES / "sparse_attention.cu"
_TILE_KEYS = 64


class Tile(NamedTuple):
    """How a launch cuts its work: 16 or 64 heads per block, and 1 to 16 blocks (one cluster) to a row's keys."""

    heads: int
    splits: int


# From a sweep on one H200, 128 + 512 keys. With few rows four tiles of 16 heads, which decode a row four times, beat
# one of 64, whose splits have four times as much to combine (rows 4: 12.1 against 15.1 us). A cluster needs its blocks'
# worth of free multiprocessors in one part of the card, so larger ones must leave room (16 heads, 16 rows: 8 splits
# 22.7 us, 5 splits 13.2). By the tile's heads: the share of the card that blocks may take, by splits.
_SPLITS = {16: {2: 1.0, 3: 0.75, 5: 0.625, 10: 0.34}, 64: {2: 1.0, 3: 0.75, 4: 0.5}}


def choose_tile(rows: int, heads: int, keys: int, multiprocessors: int) -> Tile:
    """The tile of a launch, from host numbers only, so that a captured graph keeps it."""
    narrow = heads <= 16 or 20 * rows <= multiprocessors
    tile_heads = 16 if narrow else 64
    blocks = rows * -(-heads // tile_heads)
    tiles = -(-keys // _TILE_KEYS)
    fitting = [n for n, share in _SPLITS[tile_heads].items() if n <= tiles and blocks * n <= share * multiprocessors]
    return Tile(tile_heads, max(fitting, default=1))


def sparse_attention(
    q: Tensor,
    swa_cache: Tensor,
    swa_slots: Tensor,
    main_cache: Tensor | None,
    main_slots: Tensor | None,
    attn_sink: Tensor,
    scale: float,
    *,
    tile: Tile | None = None,
) -> Tensor:
    rows, heads, window, topk = _check(q, swa_cache, swa_slots, main_cache, main_slots, attn_sink)
    out = torch.empty(rows, heads, SWA_KV.dims, dtype=torch.bfloat16, device=q.device)
    if not rows:
        return out
    multiprocessors = cuda_build.multiprocessors(q.device)
    tile = tile or choose_tile(rows, heads, window + topk, multiprocessors)
    with torch.cuda.device(q.device):
        tensors = (q, swa_cache, swa_slots, main_cache, main_slots, attn_sink)
        status = call(library(), *tensors, out, scale, tile, multiprocessors, cuda_build.stream())
    if status:
        raise RuntimeError(f"sparse_attention did not launch with {tile} for {rows} rows: CUDA error {status}")
    return out


def call(
    library: ctypes.CDLL,
    q: Tensor,
    swa_cache: Tensor,
    swa_slots: Tensor,
    main_cache: Tensor | None,
    main_slots: Tensor | None,
    attn_sink: Tensor,
    out: Tensor,
    scale: float,
    tile: Tile,
    multiprocessors: int,
    stream: int,
) -> int:
    """The C interface on checked tensors: 0, or a CUDA error."""
    rows, heads, _ = q.shape
    return library.csa2_sparse_attention(
        q.data_ptr(),
        q.stride(0),
        q.stride(1),
        *_cache_arguments(swa_cache, swa_slots),
        *_cache_arguments(main_cache, main_slots),
        attn_sink.data_ptr(),
        out.data_ptr(),
        rows,
        heads,
        swa_slots.shape[1],
        0 if main_slots is None else main_slots.shape[1],
        scale,
        tile.heads,
        tile.splits,
        multiprocessors,
        cuda_build.EARLY_START,
        stream,
    )


def _cache_arguments(cache: Tensor | None, slots: Tensor | None) -> tuple[int, int, int, bool]:
    if cache is None or slots is None:
        return 0, 0, 0, False
    return cache.data_ptr(), slots.data_ptr(), slots.stride(0), slots.dtype == torch.int64


# The arguments of the C interface.
FUNCTIONS = {
    "csa2_sparse_attention": [
        *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64),
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int) * 2,
        *(ctypes.c_void_p, ctypes.c_void_p),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_float),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p),
    ]
}


@functools.cache
def library() -> ctypes.CDLL:
    """The kernel, built where it is missing."""
    return cuda_build.load(SOURCE, FUNCTIONS)


def _check(
    q: Tensor,
    swa_cache: Tensor,
    swa_slots: Tensor,
    main_cache: Tensor | None,
    main_slots: Tensor | None,
    attn_sink: Tensor,
) -> tuple[int, int, int, int]:
    sizes = check_tensors(q, swa_cache, swa_slots, main_cache, main_slots, attn_sink)
    if q.data_ptr() % 16 or q.stride(0) % 8 or q.stride(1) % 8:
        raise ValueError(f"q must start at and step by multiples of 16 bytes, got strides {q.stride()}: copy it first")
    for name, cache in (("swa_cache", swa_cache), ("main_cache", main_cache)):
        if cache is not None and cache.data_ptr() % 16:
            raise ValueError(
                f"{name} records must start at a multiple of 16 bytes, got {cache.data_ptr():#x}: "
                "view the pool's buffer"
            )
    cuda_build.check_devices(q, swa_cache, swa_slots, main_cache, main_slots, attn_sink)
    return sizes
