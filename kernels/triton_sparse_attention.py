"""Sparse attention on CUDA over packed SWA KV and chosen main KV, one softmax with a sink (spec 2.8).

    sparse_attention(q bf16 [n, heads, 512], swa_cache uint8 [slots, 528], swa_slots int [n, window],
                     main_cache uint8 [slots, 288] | None, main_slots int [n, k] | None,
                     attn_sink fp32 [heads], scale) -> bf16 [n, heads, 512]

    s_k = scale * q . k        out = sum_k exp(s_k) k / (sum_k exp(s_k) + exp(sink))

The contract of `sparse_attention.py`: keys are values too, a slot of -1 (anywhere in a row) is no key and reads
nothing, a row without keys gives zeros, any number of heads. Dots are bf16 with fp32 accumulation, scores and the
denominator fp32, P is rounded to bf16 for the product with V, as in the published code.

One program takes a row, a tile of heads and a share of the row's key blocks: it gathers packed records ahead of use,
decodes a tile of them and uses it twice, as keys and as values. Where rows are few a row's key blocks are split over
programs, which leave unnormalised fp32 sums for `_combine_kernel`. A tile of 64 heads runs on warpgroup dots over
whole rows (sm_90); smaller ones on warp dots, with even and odd dims as two tiles, which no one need interleave.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_csa2.kernels.triton_gather import load_main_tile, load_swa_tile
from sglang_csa2.kernels.triton_records import INT_TYPES, UNSHIFT, check_rows, compute_capability, uses_inline_ptx
from sglang_csa2.layout import MAIN_KV, SWA_KV

_LOG2_E = 1.4426950408889634


class Tile(NamedTuple):
    """How a launch cuts its work: heads and keys per step, splits of a row's keys, warps and load stages."""

    heads: int
    keys: int
    splits: int
    warps: int
    stages: int


# From a sweep on one H200 (128 + 512 keys, heads 64 and 16, rows 1, 16, 32, 128; us):
#   heads 64: 13.9, 23.5, 30.5, 59.8    heads 16: 13.9, 16.7, 23.1, 56.5
# Halving the output dims per program, 32 heads, and 32 keys per step with warpgroup dots all lost.
_WARPGROUP_TILE = (64, 64, 8, 2)
_WARP_TILE = (16, 32, 4, 3)
_MAX_SPLITS = 8
_MULTIPROCESSORS = 132


def choose_tile(rows: int, heads: int, keys: int, capability: int) -> Tile:
    """The tile of a launch, from host numbers only, so that a captured graph keeps it."""
    narrow = rows * triton.cdiv(heads, 16) * _MAX_SPLITS
    # While narrow tiles fill the card at most twice, they hide each other's waits better.
    wide = capability // 10 == 9 and heads > 16 and narrow > 2 * _MULTIPROCESSORS
    tile_heads, tile_keys, warps, stages = _WARPGROUP_TILE if wide else _WARP_TILE
    programs = rows * triton.cdiv(heads, tile_heads)
    room = _MULTIPROCESSORS if wide else 2 * _MULTIPROCESSORS
    splits = 1
    while splits < _MAX_SPLITS and 2 * splits * programs <= room and 4 * splits * tile_keys <= 2 * keys:
        splits *= 2
    return Tile(tile_heads, tile_keys, splits, warps, stages)


@triton.jit
def _attend_tile(q, q_odd, even, odd, present, heads, scale_log2, peak, total, out, out_odd, WHOLE: tl.constexpr):
    """One step of the online softmax over a decoded tile, bf16 [BLOCK_N, 256] even and odd dims.

    WHOLE joins the dims: q and out are [BLOCK_H, 512]. Otherwise each pair holds even and odd dims, [BLOCK_H, 256].
    """
    if WHOLE:
        keys = tl.interleave(even, odd)
        # The first branch is always taken. Seen side by side, the compiler lays this dot out for the one that follows,
        # all warps along the heads, and two warpgroups compute the same scores.
        if heads > 0:
            scores = tl.dot(q, tl.trans(keys))
        else:
            scores = tl.dot(q, tl.trans(keys)) * 2
    else:
        scores = tl.dot(q_odd, tl.trans(odd), tl.dot(q, tl.trans(even)))
    scores = tl.where(present[None, :], scores * scale_log2, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    rescale = tl.exp2(peak - new_peak)
    weights = tl.exp2(scores - new_peak[:, None])
    total = total * rescale + tl.sum(weights, axis=1)
    weights = weights.to(tl.bfloat16)
    if WHOLE:
        out = tl.dot(weights, keys, out * rescale[:, None])
    else:
        out = tl.dot(weights, even, out * rescale[:, None])
        out_odd = tl.dot(weights, odd, out_odd * rescale[:, None])
    return new_peak, total, out, out_odd


@triton.jit
def _sparse_attention_kernel(
    q_ptr,  # bf16 [n, heads, 512], strides `q_row`, `q_head`
    swa_ptr,  # uint8 [slots, 528]
    swa_slots_ptr,  # int [n, window], row stride `swa_row`
    main_ptr,  # uint8 [slots, 288]; unused where MAIN_BLOCKS is 0
    main_slots_ptr,  # int [n, topk], row stride `main_row`; unused where MAIN_BLOCKS is 0
    sink_ptr,  # fp32 [heads]
    out_ptr,  # bf16 [n, heads, 512] contiguous
    partial_ptr,  # fp32 [n, SPLITS, heads, 512], unused where SPLITS is 1
    peaks_ptr,  # fp32 [n, SPLITS, heads, 2], unused where SPLITS is 1: peak (base 2) and total
    q_row,
    q_head,
    swa_row,
    main_row,
    heads,
    window,
    topk,
    scale_log2,
    WINDOW_BLOCKS: tl.constexpr,
    MAIN_BLOCKS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
    PTX: tl.constexpr,
):
    # Programs of a row are neighbours, so that they share its records in L2.
    head_tiles = tl.cdiv(heads, BLOCK_H)
    program = tl.program_id(0)
    row = (program // (head_tiles * SPLITS)).to(tl.int64)
    split = program // head_tiles % SPLITS
    head = program % head_tiles * BLOCK_H + tl.arange(0, BLOCK_H)
    in_heads = head < heads
    blocks: tl.constexpr = WINDOW_BLOCKS + MAIN_BLOCKS
    first = split * blocks // SPLITS
    last = (split + 1) * blocks // SPLITS

    dim = tl.arange(0, 512)
    q = tl.load(q_ptr + row * q_row + head[:, None] * q_head + dim[None, :], mask=in_heads[:, None], other=0.0)
    q_odd = q
    if not WHOLE:
        q, q_odd = tl.split(tl.reshape(q, (BLOCK_H, 256, 2)))
    # A finite start keeps a row without keys at exp(-inf) = 0 rather than NaN.
    peak = tl.full((BLOCK_H,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    out = tl.zeros((BLOCK_H, 512 if WHOLE else 256), tl.float32)
    # Unused where WHOLE: the smallest thing that can be carried.
    out_odd = total if WHOLE else tl.zeros((BLOCK_H, 256), tl.float32)
    lane = tl.arange(0, BLOCK_N)

    for block in tl.range(first, tl.minimum(last, WINDOW_BLOCKS), num_stages=STAGES):
        key = block * BLOCK_N + lane
        slots = tl.load(swa_slots_ptr + row * swa_row + key, mask=key < window, other=-1).to(tl.int64)
        even, odd = load_swa_tile(swa_ptr, slots, slots >= 0, PTX)
        peak, total, out, out_odd = _attend_tile(
            q, q_odd, even, odd, slots >= 0, heads, scale_log2, peak, total, out, out_odd, WHOLE
        )
    for block in tl.range(tl.maximum(first, WINDOW_BLOCKS), last, num_stages=STAGES):
        key = (block - WINDOW_BLOCKS) * BLOCK_N + lane
        slots = tl.load(main_slots_ptr + row * main_row + key, mask=key < topk, other=-1).to(tl.int64)
        even, odd = load_main_tile(main_ptr, slots, slots >= 0, PTX)
        peak, total, out, out_odd = _attend_tile(
            q, q_odd, even, odd, slots >= 0, heads, scale_log2, peak, total, out, out_odd, WHOLE
        )

    if not WHOLE:
        out = tl.interleave(out, out_odd)
    if SPLITS == 1:
        sink = tl.load(sink_ptr + head, mask=in_heads, other=0.0)
        total += tl.exp2(sink * 1.4426950408889634 - peak)
        norm = tl.where(total > 0, UNSHIFT / total, 0.0)[:, None]
        target = out_ptr + (row * heads + head[:, None]) * 512 + dim[None, :]
        tl.store(target, (out * norm).to(tl.bfloat16), mask=in_heads[:, None])
    else:
        partial = (row * SPLITS + split) * heads + head
        tl.store(partial_ptr + partial[:, None] * 512 + dim[None, :], out, mask=in_heads[:, None])
        tl.store(peaks_ptr + partial * 2, peak, mask=in_heads)
        tl.store(peaks_ptr + partial * 2 + 1, total, mask=in_heads)


@triton.jit
def _combine_kernel(
    partial_ptr,  # fp32 [n, SPLITS, heads, 512]
    peaks_ptr,  # fp32 [n, SPLITS, heads, 2]: peak (base 2) and total
    sink_ptr,  # fp32 [heads]
    out_ptr,  # bf16 [n, heads, 512] contiguous
    heads,
    SPLITS: tl.constexpr,
):
    row = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    split = tl.arange(0, SPLITS)
    partial = (row * SPLITS + split) * heads + head
    peaks = tl.load(peaks_ptr + partial * 2)
    totals = tl.load(peaks_ptr + partial * 2 + 1)
    peak = tl.max(peaks, axis=0)
    weights = tl.exp2(peaks - peak)
    total = tl.sum(totals * weights, axis=0)
    total += tl.exp2(tl.load(sink_ptr + head) * 1.4426950408889634 - peak)
    norm = tl.where(total > 0, UNSHIFT / total, 0.0)
    dim = tl.arange(0, 512)
    parts = tl.load(partial_ptr + partial[:, None] * 512 + dim[None, :])
    out = tl.sum(parts * weights[:, None], axis=0) * norm
    tl.store(out_ptr + (row * heads + head) * 512 + dim, out.to(tl.bfloat16))


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
    rows, heads, window, topk = check_tensors(q, swa_cache, swa_slots, main_cache, main_slots, attn_sink)
    out = torch.empty(rows, heads, SWA_KV.dims, dtype=torch.bfloat16, device=q.device)
    if not rows:
        return out
    tile = tile or choose_tile(rows, heads, window + topk, compute_capability(q.device))
    window_blocks, main_blocks = triton.cdiv(window, tile.keys), triton.cdiv(topk, tile.keys)
    partial, peaks = out, out
    if tile.splits > 1:
        partial = torch.empty(rows, tile.splits, heads, SWA_KV.dims, dtype=torch.float32, device=q.device)
        peaks = torch.empty(rows, tile.splits, heads, 2, dtype=torch.float32, device=q.device)
    _sparse_attention_kernel[(triton.cdiv(heads, tile.heads) * tile.splits * rows,)](
        q,
        swa_cache,
        swa_slots,
        swa_cache if main_cache is None else main_cache,
        swa_slots if main_slots is None else main_slots,
        attn_sink,
        out,
        partial,
        peaks,
        q.stride(0),
        q.stride(1),
        swa_slots.stride(0),
        0 if main_slots is None else main_slots.stride(0),
        heads,
        window,
        topk,
        scale * _LOG2_E * UNSHIFT.value,
        WINDOW_BLOCKS=window_blocks,
        MAIN_BLOCKS=main_blocks,
        SPLITS=tile.splits,
        BLOCK_H=tile.heads,
        BLOCK_N=tile.keys,
        WHOLE=tile.heads >= 64,
        STAGES=tile.stages,
        PTX=uses_inline_ptx(),
        num_warps=tile.warps,
    )
    if tile.splits > 1:
        _combine_kernel[(heads * rows,)](partial, peaks, attn_sink, out, heads, SPLITS=tile.splits, num_warps=4)
    return out


def check_tensors(
    q: Tensor,
    swa_cache: Tensor,
    swa_slots: Tensor,
    main_cache: Tensor | None,
    main_slots: Tensor | None,
    attn_sink: Tensor,
) -> tuple[int, int, int, int]:
    """Raise unless the tensors keep the contract; -> rows, heads, window, Top-K. Shared with the CUDA C++ form."""
    check_rows("q", q, (None, None, SWA_KV.dims), (torch.bfloat16,))
    rows, heads, _ = q.shape
    if not heads:
        raise ValueError(f"q must have a head at least, got shape {tuple(q.shape)}")
    check_rows("attn_sink", attn_sink, (heads,), (torch.float32,))
    check_rows("swa_cache", swa_cache, (None, SWA_KV.bytes), (torch.uint8,))
    check_rows("swa_slots", swa_slots, (rows, None), INT_TYPES)
    if (main_cache is None) != (main_slots is None):
        raise ValueError("main_cache and main_slots go together: give both, or neither for an SWA-only layer")
    if main_cache is not None:
        check_rows("main_cache", main_cache, (None, MAIN_KV.bytes), (torch.uint8,))
        check_rows("main_slots", main_slots, (rows, None), INT_TYPES)
    for name, cache in (("swa_cache", swa_cache), ("main_cache", main_cache)):
        if cache is not None and not cache.is_contiguous():
            raise ValueError(f"{name} records must be adjacent, got strides {cache.stride()}: view the pool's buffer")
    return rows, heads, swa_slots.shape[1], 0 if main_slots is None else main_slots.shape[1]
