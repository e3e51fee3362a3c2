"""Gather records by slot and dequantize them into a bf16 workspace on CUDA.

    gather_swa_kv(cache uint8 [slots, 528], slots int [n], out bf16 [n, 512] | None)  -> bf16 [n, 512]
    gather_main_kv(cache uint8 [slots, 288], slots int [n], out bf16 [n, 512] | None) -> bf16 [n, 512]

Exact: a decoded value fits bf16. A negative slot reads nothing and gives zeros; every row of `out` is written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_csa2.kernels.triton_records import (
    INT_TYPES,
    UNSHIFT,
    check_rows,
    decode_e2m1_pairs,
    decode_e4m3_pairs,
    e4m3_multiplier,
    nvfp4_multiplier,
    uses_inline_ptx,
)
from sglang_csa2.layout import MAIN_KV, SWA_KV

_BLOCK_ROWS = 8


@triton.jit
def load_swa_tile(cache_ptr, slots, present, PTX: tl.constexpr):
    """Records of int64 slots [n] where `present` -> even dims, odd dims, bf16 [n, 256] each, over UNSHIFT."""
    count: tl.constexpr = slots.shape[0]
    record = (cache_ptr + slots * 528)[:, None]
    here = present[:, None]
    # Loaded flat and grouped in registers: a grouped load would be staged across shared memory's banks.
    pairs = tl.load(record.to(tl.pointer_type(tl.int16)) + tl.arange(0, 256)[None, :], mask=here, other=0)
    scales = tl.load(record + 512 + tl.arange(0, 16)[None, :], mask=here, other=0)
    multiplier = e4m3_multiplier(scales.to(tl.int32))[:, :, None]
    even, odd = decode_e4m3_pairs(tl.reshape(pairs, (count, 16, 16)), multiplier, PTX)
    return tl.reshape(even, (count, 256)), tl.reshape(odd, (count, 256))


@triton.jit
def load_main_tile(cache_ptr, slots, present, PTX: tl.constexpr):
    """Records of int64 slots [n] where `present` -> even dims, odd dims, bf16 [n, 256] each, over UNSHIFT."""
    count: tl.constexpr = slots.shape[0]
    record = (cache_ptr + slots * 288)[:, None]
    here = present[:, None]
    pairs = tl.load(record + tl.arange(0, 256)[None, :], mask=here, other=0)
    scales = tl.load(record + 256 + tl.arange(0, 32)[None, :], mask=here, other=0)
    multiplier = nvfp4_multiplier(scales.to(tl.int32))[:, :, None]
    even, odd = decode_e2m1_pairs(tl.reshape(pairs, (count, 32, 8)), multiplier, PTX)
    return tl.reshape(even, (count, 256)), tl.reshape(odd, (count, 256))


@triton.jit
def _gather_kernel(
    cache_ptr,  # uint8 [slots, 528 or 288]
    slots_ptr,  # int [n]
    out_ptr,  # bf16 [n, 512]
    rows,
    IS_SWA: tl.constexpr,
    BLOCK: tl.constexpr,
    PTX: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_range = row < rows
    slots = tl.load(slots_ptr + row, mask=in_range, other=-1).to(tl.int64)
    if IS_SWA:
        even, odd = load_swa_tile(cache_ptr, slots, slots >= 0, PTX)
    else:
        even, odd = load_main_tile(cache_ptr, slots, slots >= 0, PTX)
    values = (tl.interleave(even, odd).to(tl.float32) * UNSHIFT).to(tl.bfloat16)
    dim = tl.arange(0, 512)
    tl.store(out_ptr + row[:, None] * 512 + dim[None, :], values, mask=in_range[:, None])


def gather_swa_kv(cache: Tensor, slots: Tensor, out: Tensor | None = None) -> Tensor:
    return _gather(cache, slots, out, SWA_KV.bytes, is_swa=True)


def gather_main_kv(cache: Tensor, slots: Tensor, out: Tensor | None = None) -> Tensor:
    return _gather(cache, slots, out, MAIN_KV.bytes, is_swa=False)


def _gather(cache: Tensor, slots: Tensor, out: Tensor | None, record_bytes: int, *, is_swa: bool) -> Tensor:
    check_rows("cache", cache, (None, record_bytes), (torch.uint8,))
    if not cache.is_contiguous():
        raise ValueError(f"cache must be contiguous, got strides {cache.stride()}: pass a whole buffer")
    out = room_for_keys(cache, slots, out)
    if rows := slots.shape[0]:
        grid = (triton.cdiv(rows, _BLOCK_ROWS),)
        _gather_kernel[grid](cache, slots, out, rows, IS_SWA=is_swa, BLOCK=_BLOCK_ROWS, PTX=uses_inline_ptx())
    return out


def room_for_keys(cache: Tensor, slots: Tensor, out: Tensor | None) -> Tensor:
    """Where the keys of checked slots go: `out`, or a new buffer."""
    check_rows("slots", slots, (None,), INT_TYPES)
    shape = (slots.shape[0], SWA_KV.dims)
    if out is None:
        return torch.empty(shape, dtype=torch.bfloat16, device=cache.device)
    check_rows("out", out, shape, (torch.bfloat16,))
    if not out.is_contiguous():
        raise ValueError(f"out must be contiguous, got strides {out.stride()}: pass a whole buffer")
    return out
