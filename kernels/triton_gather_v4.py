"""Gather V4 records by slot and dequantize them into a bf16 workspace on CUDA.

    gather_v4(cache uint8 [pages, slots, 584], slots int [n], out bf16 [n, 512] | None) -> bf16 [n, 512]

Exact. A negative slot reads nothing and gives zeros; every row of `out` is written.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sglang_csa2.kernels.triton_gather import room_for_keys
from sglang_csa2.kernels.triton_records import exp2_of_biased, signed_e4m3
from sglang_csa2.kernels.triton_store_v4 import check_pages

_BLOCK_ROWS = 4


@triton.jit
def _gather_v4_kernel(
    cache_ptr,  # uint8 pages `page_stride` apart
    slots_ptr,  # int [n]
    out_ptr,  # bf16 [n, 512]
    rows,
    page_stride,
    PAGE_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_range = row < rows
    slots = tl.load(slots_ptr + row, mask=in_range, other=-1).to(tl.int64)
    present = (slots >= 0)[:, None]
    page = cache_ptr + (slots // PAGE_SLOTS) * page_stride
    data = (page + (slots % PAGE_SLOTS) * 576)[:, None]
    dim = tl.arange(0, 512)[None, :]
    code = tl.load(data + dim, mask=present & (dim < 448), other=0).to(tl.int32)
    scales = (page + PAGE_SLOTS * 576 + (slots % PAGE_SLOTS) * 8)[:, None]
    scale = exp2_of_biased(tl.load(scales + dim // 64, mask=present & (dim < 448), other=0).to(tl.int32))
    value = signed_e4m3(code) * scale
    roped = tl.load((data + 448).to(tl.pointer_type(tl.bfloat16)) + (dim - 448), mask=present & (dim >= 448), other=0.0)
    value = tl.where(dim < 448, value.to(tl.bfloat16), roped)
    tl.store(out_ptr + row[:, None] * 512 + dim, value, mask=in_range[:, None])


def gather_v4(cache: Tensor, slots: Tensor, out: Tensor | None = None) -> Tensor:
    check_pages(cache)
    out = room_for_keys(cache, slots, out)
    if rows := slots.shape[0]:
        grid = (triton.cdiv(rows, _BLOCK_ROWS),)
        _gather_v4_kernel[grid](cache, slots, out, rows, cache.stride(0), PAGE_SLOTS=cache.shape[1], BLOCK=_BLOCK_ROWS)
    return out
