"""The two KV stores on CUDA into V4 records: normalise, rotate, round to the model's grid, encode, write.

    swa_store_v4      kv     [n, 512] bf16 -> cache uint8 [pages, slots, 584]
    main_kv_store_v4  latent [n, 512] bf16 -> cache uint8 [pages, slots, 584]; with `weight` also normalises

Same contract as `triton_store.py`, whose rounding to the model's grids they share, on caches of `records_v4.py`; the
bytes are those of `store.swa_store_v4` and `store.main_kv_store_v4`. Index K is stored by `triton_store.py`.

One program per row; a row is read and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_csa2.kernels.triton_records import (
    ceil_exponent,
    decode_e4m3,
    encode_e4m3,
    exp2_of_biased,
    signed_e4m3,
    with_sign,
)
from sglang_csa2.kernels.triton_store import (
    OPTIONS,
    check_inputs,
    check_shared,
    launch_main_kv,
    load_pairs,
    normalise,
    quantize_main,
    quantize_swa,
    rotate,
)
from sglang_csa2.layout import V4_KV


@triton.jit
def _signed_e2m1(code):
    magnitude = code & 7
    normal = (((magnitude >> 1) + 126) << 23 | ((magnitude & 1) << 22)).to(tl.float32, bitcast=True)
    return with_sign(tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal), (code & 8) << 28)


@triton.jit
def _write(
    even,
    odd,
    cache_ptr,
    slot,
    page_stride,
    GROUPS: tl.constexpr,
    PAIRS: tl.constexpr,
    PAGE_SLOTS: tl.constexpr,
):
    """Encode a row's values, fp32 [GROUPS, PAIRS] each of even and odd dims, and write them to its slot."""
    # V4's groups of 64 dims are several of these. Only their maxima are reshaped, one number a group: on triton 3.6 a
    # maximum over a reshaped tile combined wrong lanes, and this form was right on an H200 (tests/kernels/test_v4.py).
    SMALL: tl.constexpr = GROUPS // 8
    amax = tl.reshape(tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), axis=1), (8, SMALL))
    exponent = ceil_exponent(tl.maximum(tl.max(amax, axis=1), 1e-4) * 0.002232142857142857)
    inverse = tl.reshape(tl.broadcast_to(exp2_of_biased(254 - exponent)[:, None], (8, SMALL)), (GROUPS,))[:, None]
    packed = encode_e4m3(tl.clamp(even * inverse, -448.0, 448.0))
    packed |= encode_e4m3(tl.clamp(odd * inverse, -448.0, 448.0)) << 8
    page = cache_ptr + (slot // PAGE_SLOTS) * page_stride
    data = page + (slot % PAGE_SLOTS) * 576
    pair = tl.arange(0, GROUPS)[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    is_fp8 = pair < 224
    tl.store(data.to(tl.pointer_type(tl.int16)) + pair, packed.to(tl.int16), mask=is_fp8)
    # Pair 224 is the first of bf16: 448 bytes of data lie before it, and four bytes hold a pair.
    low = even.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    high = odd.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16
    tl.store((data + 448).to(tl.pointer_type(tl.int32)) + (pair - 224), low | high, mask=pair >= 224)
    scales = page + PAGE_SLOTS * 576 + (slot % PAGE_SLOTS) * 8
    group = tl.arange(0, 8)
    tl.store(scales + group, tl.where(group < 7, exponent, 0).to(tl.uint8))


@triton.jit
def _swa_store_v4_kernel(
    kv_ptr,  # bf16 [n, 512], row stride `kv_stride`
    weight_ptr,  # [512]
    table_ptr,  # fp32 [positions, 32, 2]
    positions_ptr,  # int [n]
    slots_ptr,  # int [n]
    cache_ptr,  # uint8 pages `page_stride` apart
    kv_stride,
    page_stride,
    eps,
    PAGE_SLOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot >= 0:
        even, odd = load_pairs(kv_ptr + row * kv_stride, 16, 16)
        even, odd = normalise(even, odd, weight_ptr, eps, 16, 16)
        even, odd = rotate(even, odd, table_ptr, tl.load(positions_ptr + row).to(tl.int64), 16, 16)
        even_code, odd_code, exponent = quantize_swa(even, odd)
        scale = exp2_of_biased(exponent)[:, None]
        even, odd = signed_e4m3(even_code) * scale, signed_e4m3(odd_code) * scale
        _write(even, odd, cache_ptr, slot, page_stride, 16, 16, PAGE_SLOTS)


@triton.jit
def _main_kv_store_v4_kernel(
    latent_ptr,  # bf16 [n, 512], row stride `latent_stride`
    weight_ptr,  # [512], or unused
    normed_ptr,  # bf16 [n, 512] contiguous, or unused
    table_ptr,  # fp32 [positions, 32, 2]
    positions_ptr,  # int [n]
    slots_ptr,  # int [n]
    cache_ptr,  # uint8 pages `page_stride` apart
    latent_stride,
    page_stride,
    eps,
    NORM: tl.constexpr,
    PAGE_SLOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    pair = tl.arange(0, 32)[:, None] * 8 + tl.arange(0, 8)[None, :]
    even, odd = load_pairs(latent_ptr + row * latent_stride, 32, 8)
    if NORM:
        even, odd = normalise(even, odd, weight_ptr, eps, 32, 8)
        tl.store(normed_ptr + row * 512 + 2 * pair, even.to(tl.bfloat16))
        tl.store(normed_ptr + row * 512 + 2 * pair + 1, odd.to(tl.bfloat16))
    if slot >= 0:
        even, odd = rotate(even, odd, table_ptr, tl.load(positions_ptr + row).to(tl.int64), 32, 8)
        even_code, odd_code, scale_code = quantize_main(even, odd)
        scale = decode_e4m3(scale_code)[:, None]
        even, odd = _signed_e2m1(even_code) * scale, _signed_e2m1(odd_code) * scale
        _write(even, odd, cache_ptr, slot, page_stride, 32, 8, PAGE_SLOTS)


def swa_store_v4(
    kv: Tensor, weight: Tensor, eps: float, table: Tensor, positions: Tensor, slots: Tensor, cache: Tensor
) -> None:
    rows = kv.shape[0]
    check_inputs("kv", kv, V4_KV.dims, positions, slots)
    check_shared(weight, V4_KV.dims, table)
    check_pages(cache)
    if rows:
        table, strides = torch.view_as_real(table), (kv.stride(0), cache.stride(0))
        _swa_store_v4_kernel[(rows,)](
            kv, weight, table, positions, slots, cache, *strides, eps, PAGE_SLOTS=cache.shape[1], **OPTIONS
        )


def main_kv_store_v4(
    latent: Tensor,
    table: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
    *,
    weight: Tensor | None = None,
    eps: float = 0.0,
    normed: Tensor | None = None,
) -> None:
    check_pages(cache)
    tensors = (latent, table, positions, slots, cache, weight, eps, normed)
    launch_main_kv(_main_kv_store_v4_kernel, *tensors, cache.stride(0), PAGE_SLOTS=cache.shape[1])


def check_pages(cache: Tensor) -> None:
    """Raise unless `cache` is the view of a V4 cache: whole pages, each its slots' data and then their scales."""
    if cache.ndim != 3 or cache.shape[2] != V4_KV.bytes or cache.dtype is not torch.uint8:
        raise ValueError(f"cache must be uint8 [pages, slots, {V4_KV.bytes}], got {cache.dtype} {list(cache.shape)}")
    if cache.stride()[1:] != (V4_KV.bytes, 1) or cache.stride(0) % V4_KV.data_bytes or cache.data_ptr() % 16:
        raise ValueError(
            f"cache pages must be whole, at multiples of 16 and {V4_KV.data_bytes} bytes apart, got strides "
            f"{cache.stride()} at {cache.data_ptr():#x}: view the pool's buffer"
        )
