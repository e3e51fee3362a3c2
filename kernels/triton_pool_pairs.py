"""Ratio-2 pooling fused with its RMSNorm on CUDA, across chunk borders (spec 2.4).

    pooled = softmax over the two tokens, per channel, of score . kv      fp32, rounded once to bf16
    latent = bf16(pooled / rms(pooled) * weight)

    pool_pairs(kv, score fp32 [n, 512], odd_rows [m], partner_rows [m], pending fp32 [ring rows, 1024],
               pending_reads [m], weight, eps) -> latent bf16 [m, 512]
    keep_pending(kv, score, rows [p], pending, ring_rows [p])          writes kv | score of the waiting rows
    pool_decode(kv, score [n, 512], positions [n], requests [n], out_slots [n], pending, ring, weight, eps)
               -> latent bf16 [n, 512], entry_slots int64 [n], entry_positions int64 [n]

`pool_pairs` and `keep_pending` have the contract of `pool_pairs.py`: `partner_rows[i]` is the even row of the
pair, or -1 to read ring row `pending_reads[i]`; a negative ring row keeps nothing.

`pool_decode` is the form of one row per request with fixed shapes, for CUDA graphs. An even position keeps
its kv and score in ring row `requests * ring + positions % ring` and emits nothing: latent 0, slot -1,
position 0. An odd one reads the ring row of the position before it, and emits the latent with slot
`out_slots // 2` and the position of the pair's first token. A row with a negative request or out_slot is padding:
it reads and writes no ring row and emits nothing. Requests of one call are distinct.

Rows of kv and score may be strided. One program per row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_csa2.kernels.triton_records import INT_TYPES, check_rows
from sglang_csa2.layout import MAIN_KV, PENDING_PAIR_WIDTH

_OPTIONS = {"num_warps": 2, "enable_fp_fusion": False}


@triton.jit
def _pool_and_norm(even_kv, even_score, odd_kv, odd_score, weight, eps, DIMS: tl.constexpr):
    peak = tl.maximum(even_score, odd_score)
    even_weight, odd_weight = tl.exp(even_score - peak), tl.exp(odd_score - peak)
    total = even_weight + odd_weight
    pooled = even_kv * tl.div_rn(even_weight, total) + odd_kv * tl.div_rn(odd_weight, total)
    pooled = pooled.to(tl.bfloat16).to(tl.float32)
    inverse_rms = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(pooled * pooled, axis=0) * (1.0 / DIMS) + eps))
    return (pooled * inverse_rms * weight).to(tl.bfloat16)


@triton.jit
def _pool_pairs_kernel(
    kv_ptr,  # fp32 [n, 512], row stride `kv_stride`
    score_ptr,  # fp32 [n, 512], row stride `score_stride`
    odd_rows_ptr,  # int [m]
    partner_rows_ptr,  # int [m]
    pending_ptr,  # fp32 [ring rows, 1024]
    pending_reads_ptr,  # int [m]
    weight_ptr,  # [512]
    latent_ptr,  # bf16 [m, 512]
    kv_stride,
    score_stride,
    eps,
    DIMS: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, DIMS)
    odd = tl.load(odd_rows_ptr + pair).to(tl.int64)
    partner = tl.load(partner_rows_ptr + pair).to(tl.int64)
    in_batch = partner >= 0
    waiting = pending_ptr + tl.load(pending_reads_ptr + pair).to(tl.int64) * (2 * DIMS)
    even_kv = tl.load(tl.where(in_batch, kv_ptr + partner * kv_stride, waiting) + dim)
    even_score = tl.load(tl.where(in_batch, score_ptr + partner * score_stride, waiting + DIMS) + dim)
    odd_kv = tl.load(kv_ptr + odd * kv_stride + dim)
    odd_score = tl.load(score_ptr + odd * score_stride + dim)
    weight = tl.load(weight_ptr + dim).to(tl.float32)
    latent = _pool_and_norm(even_kv, even_score, odd_kv, odd_score, weight, eps, DIMS)
    tl.store(latent_ptr + pair * DIMS + dim, latent)


@triton.jit
def _keep_pending_kernel(
    kv_ptr,  # fp32 [n, 512], row stride `kv_stride`
    score_ptr,  # fp32 [n, 512], row stride `score_stride`
    rows_ptr,  # int [p]
    pending_ptr,  # fp32 [ring rows, 1024]
    ring_rows_ptr,  # int [p]
    kv_stride,
    score_stride,
    DIMS: tl.constexpr,
):
    index = tl.program_id(0)
    dim = tl.arange(0, DIMS)
    row = tl.load(rows_ptr + index).to(tl.int64)
    ring_row = tl.load(ring_rows_ptr + index).to(tl.int64)
    if ring_row >= 0:
        kept = pending_ptr + ring_row * (2 * DIMS)
        tl.store(kept + dim, tl.load(kv_ptr + row * kv_stride + dim))
        tl.store(kept + DIMS + dim, tl.load(score_ptr + row * score_stride + dim))


@triton.jit
def _pool_decode_kernel(
    kv_ptr,  # fp32 [n, 512], row stride `kv_stride`
    score_ptr,  # fp32 [n, 512], row stride `score_stride`
    positions_ptr,  # int [n]
    requests_ptr,  # int [n]
    out_slots_ptr,  # int [n]
    pending_ptr,  # fp32 [requests * ring, 1024]
    weight_ptr,  # [512]
    latent_ptr,  # bf16 [n, 512]
    entry_slots_ptr,  # int64 [n]
    entry_positions_ptr,  # int64 [n]
    kv_stride,
    score_stride,
    ring,
    eps,
    DIMS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, DIMS)
    position = tl.load(positions_ptr + row).to(tl.int64)
    request = tl.load(requests_ptr + row).to(tl.int64)
    out_slot = tl.load(out_slots_ptr + row).to(tl.int64)
    live = (request >= 0) & (out_slot >= 0)
    first = position - position % 2
    waiting = pending_ptr + (request * ring + first % ring) * (2 * DIMS)
    kv = tl.load(kv_ptr + row * kv_stride + dim)
    score = tl.load(score_ptr + row * score_stride + dim)
    emits = live & (position % 2 == 1)
    if live & (position % 2 == 0):
        tl.store(waiting + dim, kv)
        tl.store(waiting + DIMS + dim, score)
    if emits:
        even_kv, even_score = tl.load(waiting + dim), tl.load(waiting + DIMS + dim)
        weight = tl.load(weight_ptr + dim).to(tl.float32)
        latent = _pool_and_norm(even_kv, even_score, kv, score, weight, eps, DIMS)
        tl.store(latent_ptr + row * DIMS + dim, latent)
    else:
        tl.store(latent_ptr + row * DIMS + dim, tl.zeros((DIMS,), tl.bfloat16))
    tl.store(entry_slots_ptr + row, tl.where(emits, out_slot // 2, -1))
    tl.store(entry_positions_ptr + row, tl.where(emits, first, 0))


def pool_pairs(
    kv: Tensor,
    score: Tensor,
    odd_rows: Tensor,
    partner_rows: Tensor,
    pending: Tensor,
    pending_reads: Tensor,
    weight: Tensor,
    eps: float,
) -> Tensor:
    _check_inputs(kv, score, pending)
    pairs = odd_rows.shape[0]
    for name, rows in (("odd_rows", odd_rows), ("partner_rows", partner_rows), ("pending_reads", pending_reads)):
        check_rows(name, rows, (pairs,), INT_TYPES)
    check_rows("weight", weight, (MAIN_KV.dims,), (torch.bfloat16, torch.float32))
    latent = torch.empty(pairs, MAIN_KV.dims, dtype=torch.bfloat16, device=kv.device)
    if pairs:
        _pool_pairs_kernel[(pairs,)](
            kv,
            score,
            odd_rows,
            partner_rows,
            pending,
            pending_reads,
            weight,
            latent,
            kv.stride(0),
            score.stride(0),
            eps,
            DIMS=MAIN_KV.dims,
            **_OPTIONS,
        )
    return latent


def keep_pending(kv: Tensor, score: Tensor, rows: Tensor, pending: Tensor, ring_rows: Tensor) -> None:
    _check_inputs(kv, score, pending)
    check_rows("rows", rows, (None,), INT_TYPES)
    check_rows("ring_rows", ring_rows, (rows.shape[0],), INT_TYPES)
    if rows.shape[0]:
        _keep_pending_kernel[(rows.shape[0],)](
            kv, score, rows, pending, ring_rows, kv.stride(0), score.stride(0), DIMS=MAIN_KV.dims, **_OPTIONS
        )


def pool_decode(
    kv: Tensor,
    score: Tensor,
    positions: Tensor,
    requests: Tensor,
    out_slots: Tensor,
    pending: Tensor,
    ring: int,
    weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_inputs(kv, score, pending)
    rows = kv.shape[0]
    for name, column in (("positions", positions), ("requests", requests), ("out_slots", out_slots)):
        check_rows(name, column, (rows,), INT_TYPES)
    check_rows("weight", weight, (MAIN_KV.dims,), (torch.bfloat16, torch.float32))
    if ring < 1:
        raise ValueError(f"ring is {ring}: a request needs at least one ring row; pass the pool's pending_ring")
    latent = torch.empty(rows, MAIN_KV.dims, dtype=torch.bfloat16, device=kv.device)
    entry_slots = torch.empty(rows, dtype=torch.int64, device=kv.device)
    entry_positions = torch.empty_like(entry_slots)
    if rows:
        _pool_decode_kernel[(rows,)](
            kv,
            score,
            positions,
            requests,
            out_slots,
            pending,
            weight,
            latent,
            entry_slots,
            entry_positions,
            kv.stride(0),
            score.stride(0),
            ring,
            eps,
            DIMS=MAIN_KV.dims,
            **_OPTIONS,
        )
    return latent, entry_slots, entry_positions


def _check_inputs(kv: Tensor, score: Tensor, pending: Tensor) -> None:
    check_rows("kv", kv, (None, MAIN_KV.dims), (torch.float32,))
    check_rows("score", score, (kv.shape[0], MAIN_KV.dims), (torch.float32,))
    check_rows("pending", pending, (None, PENDING_PAIR_WIDTH), (torch.float32,))
    if not pending.is_contiguous():
        raise ValueError(f"pending must be contiguous, got strides {pending.stride()}: pass the pool's own buffer")
