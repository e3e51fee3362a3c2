"""The three fused stores on CUDA: normalise, rotate, quantize, pack, write (spec 2.3 to 2.6).

    swa_store      kv     [n, 512] bf16 -> cache uint8 [slots, 528]
    main_kv_store  latent [n, 512] bf16 -> cache uint8 [slots, 288]; with `weight` also normalises, into `normed`
    index_k_store  key    [n, 128] bf16 -> cache uint8 [pages, 64 * 68 or 128 * 68]

Same contract as `store.py`: row i goes to `slots[i]`, a negative slot writes nothing (`normed` is written for
every row), slots of one call are distinct, `table` is complex64 [positions, 32] looked up at `positions[i]`.
Rows may be strided. RMSNorm is fp32 with one rounding to bf16, RoPE fp32 with one rounding, and the codes are
those of `records.py` to the bit; products are kept apart from sums, as the torch form does them.

One program per row; a row is read and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_csa2.kernels.triton_records import (
    INT_TYPES,
    ceil_exponent,
    check_rows,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    exp2_of_biased,
)
from sglang_csa2.layout import INDEX_K, MAIN_KV, SWA_KV

# A row is 512 or 128 values: more warps would idle.
OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}


@triton.jit
def load_pairs(x_ptr, GROUPS: tl.constexpr, PAIRS: tl.constexpr):
    """Row [GROUPS * 2 * PAIRS] -> even and odd dims, fp32 [GROUPS, PAIRS] each."""
    pair = tl.arange(0, GROUPS)[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    return tl.load(x_ptr + 2 * pair).to(tl.float32), tl.load(x_ptr + 2 * pair + 1).to(tl.float32)


@triton.jit
def normalise(even, odd, weight_ptr, eps, GROUPS: tl.constexpr, PAIRS: tl.constexpr):
    """RMSNorm over the row, rounded to bf16 and back: fp32 [GROUPS, PAIRS] each."""
    dims: tl.constexpr = GROUPS * PAIRS * 2
    mean = tl.sum(tl.sum(even * even + odd * odd, axis=1), axis=0) * (1.0 / dims)
    inverse_rms = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    weight_even, weight_odd = load_pairs(weight_ptr, GROUPS, PAIRS)
    even = (even * inverse_rms * weight_even).to(tl.bfloat16).to(tl.float32)
    odd = (odd * inverse_rms * weight_odd).to(tl.bfloat16).to(tl.float32)
    return even, odd


@triton.jit
def rotate(even, odd, table_ptr, position, GROUPS: tl.constexpr, PAIRS: tl.constexpr):
    """Turn the row's last 32 pairs, rounded to bf16 and back; the others as they are."""
    pair = tl.arange(0, GROUPS)[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    turned = pair - (GROUPS * PAIRS - 32)
    roped = turned >= 0
    entry = table_ptr + position * 64 + 2 * turned
    cos = tl.load(entry, mask=roped, other=1.0)
    sin = tl.load(entry + 1, mask=roped, other=0.0)
    real = (even * cos - odd * sin).to(tl.bfloat16).to(tl.float32)
    imag = (even * sin + odd * cos).to(tl.bfloat16).to(tl.float32)
    # A select, not a turn by zero, keeps the sign of zeros that are not rotated.
    return tl.where(roped, real, even), tl.where(roped, imag, odd)


@triton.jit
def _group_amax(even, odd):
    return tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), axis=1)


@triton.jit
def quantize_swa(even, odd):
    """fp32 [16, 16] each -> e4m3 codes of both, int32, and the groups' biased exponents, int32 [16]."""
    amax = tl.maximum(_group_amax(even, odd), 1e-4)
    exponent = ceil_exponent(amax * 0.002232142857142857)
    # 2^-e: exact, so a product stands for the division.
    inverse = exp2_of_biased(254 - exponent)[:, None]
    even = encode_e4m3(tl.clamp(even * inverse, -448.0, 448.0))
    odd = encode_e4m3(tl.clamp(odd * inverse, -448.0, 448.0))
    return even, odd, exponent


@triton.jit
def quantize_main(even, odd):
    """fp32 [32, 8] each -> e2m1 codes of both, int32, and the groups' e4m3 scales, int32 [32]."""
    amax = tl.maximum(_group_amax(even, odd), 6 * 0.001953125)
    scale = encode_e4m3(tl.minimum(tl.div_rn(amax, 6.0), 448.0))
    divisor = tl.broadcast_to(decode_e4m3(scale)[:, None], (32, 8))
    return encode_e2m1(tl.div_rn(even, divisor)), encode_e2m1(tl.div_rn(odd, divisor)), scale


@triton.jit
def _swa_store_kernel(
    kv_ptr,  # bf16 [n, 512], row stride `kv_stride`
    weight_ptr,  # [512]
    table_ptr,  # fp32 [positions, 32, 2]
    positions_ptr,  # int [n]
    slots_ptr,  # int [n]
    cache_ptr,  # uint8 [slots, 528]
    kv_stride,
    eps,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot >= 0:
        even, odd = load_pairs(kv_ptr + row * kv_stride, 16, 16)
        even, odd = normalise(even, odd, weight_ptr, eps, 16, 16)
        even, odd = rotate(even, odd, table_ptr, tl.load(positions_ptr + row).to(tl.int64), 16, 16)
        even_code, odd_code, exponent = quantize_swa(even, odd)
        record = cache_ptr + slot * 528
        pair = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
        packed = even_code | (odd_code << 8)
        tl.store(record.to(tl.pointer_type(tl.int16)) + pair, packed.to(tl.int16))
        tl.store(record + 512 + tl.arange(0, 16), exponent.to(tl.uint8))


@triton.jit
def _main_kv_store_kernel(
    latent_ptr,  # bf16 [n, 512], row stride `latent_stride`
    weight_ptr,  # [512], or unused
    normed_ptr,  # bf16 [n, 512] contiguous, or unused
    table_ptr,  # fp32 [positions, 32, 2]
    positions_ptr,  # int [n]
    slots_ptr,  # int [n]
    cache_ptr,  # uint8 [slots, 288]
    latent_stride,
    eps,
    NORM: tl.constexpr,
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
        even_code, odd_code, scale = quantize_main(even, odd)
        packed = even_code | (odd_code << 4)
        record = cache_ptr + slot * 288
        tl.store(record + pair, packed.to(tl.uint8))
        tl.store(record + 256 + tl.arange(0, 32), scale.to(tl.uint8))


@triton.jit
def _index_k_store_kernel(
    key_ptr,  # bf16 [n, 128], row stride `key_stride`
    weight_ptr,  # [128]
    table_ptr,  # fp32 [positions, 32, 2]
    positions_ptr,  # int [n]
    slots_ptr,  # int [n]
    cache_ptr,  # uint8 [pages, 64 * 64 data | 64 * 4 scales], row stride `page_stride`
    key_stride,
    page_stride,
    eps,
    PAGE_SLOTS: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot >= 0:
        even, odd = load_pairs(key_ptr + row * key_stride, 4, 16)
        even, odd = normalise(even, odd, weight_ptr, eps, 4, 16)
        even, odd = rotate(even, odd, table_ptr, tl.load(positions_ptr + row).to(tl.int64), 4, 16)
        amax = tl.maximum(_group_amax(even, odd), 7.052966104933725e-38)
        exponent = ceil_exponent(amax * 0.16666667163372040)
        inverse = exp2_of_biased(254 - exponent)[:, None]
        packed = encode_e2m1(even * inverse) | (encode_e2m1(odd * inverse) << 4)
        page = cache_ptr + (slot // PAGE_SLOTS) * page_stride
        offset = slot % PAGE_SLOTS
        pair = tl.arange(0, 4)[:, None] * 16 + tl.arange(0, 16)[None, :]
        tl.store(page + offset * 64 + pair, packed.to(tl.uint8))
        tl.store(page + SCALE_OFFSET + offset * 4 + tl.arange(0, 4), exponent.to(tl.uint8))


def swa_store(
    kv: Tensor, weight: Tensor, eps: float, table: Tensor, positions: Tensor, slots: Tensor, cache: Tensor
) -> None:
    rows = kv.shape[0]
    check_inputs("kv", kv, SWA_KV.dims, positions, slots)
    check_shared(weight, SWA_KV.dims, table)
    _check_cache(cache, SWA_KV.bytes)
    if rows:
        _swa_store_kernel[(rows,)](
            kv, weight, torch.view_as_real(table), positions, slots, cache, kv.stride(0), eps, **OPTIONS
        )


def main_kv_store(
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
    _check_cache(cache, MAIN_KV.bytes)
    launch_main_kv(_main_kv_store_kernel, latent, table, positions, slots, cache, weight, eps, normed)


def index_k_store(
    key: Tensor, weight: Tensor, eps: float, table: Tensor, positions: Tensor, slots: Tensor, cache: Tensor
) -> None:
    rows = key.shape[0]
    check_inputs("key", key, INDEX_K.dims, positions, slots)
    check_shared(weight, INDEX_K.dims, table)
    check_rows("cache", cache, (None, None), (torch.uint8,))
    if cache.shape[1] not in (64 * INDEX_K.bytes, 128 * INDEX_K.bytes):
        raise ValueError(f"cache must have pages of 64 or 128 slots of {INDEX_K.bytes} bytes, got {cache.shape[1]}")
    page_slots = cache.shape[1] // INDEX_K.bytes
    if rows:
        _index_k_store_kernel[(rows,)](
            key,
            weight,
            torch.view_as_real(table),
            positions,
            slots,
            cache,
            key.stride(0),
            cache.stride(0),
            eps,
            PAGE_SLOTS=page_slots,
            SCALE_OFFSET=page_slots * INDEX_K.data_bytes,
            **OPTIONS,
        )


def launch_main_kv(kernel, latent, table, positions, slots, cache, weight, eps, normed, *strides, **constants) -> None:
    """Check what both layouts' main KV stores take and run one; strides, constants: the kernel's further ones."""
    check_inputs("latent", latent, MAIN_KV.dims, positions, slots)
    check_shared(weight, MAIN_KV.dims, table)
    if (weight is None) != (normed is None):
        raise ValueError("weight and normed go together: give both to normalise here, neither for a normalised latent")
    if normed is not None:
        check_rows("normed", normed, tuple(latent.shape), (torch.bfloat16,))
        if not normed.is_contiguous():
            raise ValueError(f"normed must be contiguous, got strides {normed.stride()}: allocate it with torch.empty")
    if latent.shape[0]:
        kernel[(latent.shape[0],)](
            latent,
            latent if weight is None else weight,
            latent if normed is None else normed,
            torch.view_as_real(table),
            positions,
            slots,
            cache,
            latent.stride(0),
            *strides,
            eps,
            NORM=weight is not None,
            **constants,
            **OPTIONS,
        )


def check_inputs(name: str, x: Tensor, dims: int, positions: Tensor, slots: Tensor) -> None:
    check_rows(name, x, (None, dims), (torch.bfloat16,))
    check_rows("positions", positions, (x.shape[0],), INT_TYPES)
    check_rows("slots", slots, (x.shape[0],), INT_TYPES)


def check_shared(weight: Tensor | None, dims: int, table: Tensor) -> None:
    if weight is not None:
        check_rows("weight", weight, (dims,), (torch.bfloat16, torch.float32))
    check_rows("table", table, (None, 32), (torch.complex64,))
    if not table.is_contiguous():
        raise ValueError(f"table must be contiguous, got strides {table.stride()}: copy it once at load")


def _check_cache(cache: Tensor, record_bytes: int) -> None:
    check_rows("cache", cache, (None, record_bytes), (torch.uint8,))
    if not cache.is_contiguous():
        raise ValueError(f"cache records must be adjacent, got strides {cache.stride()}: view the pool's own buffer")
