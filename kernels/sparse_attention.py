"""Sparse attention over packed SWA KV and chosen main KV, one softmax with a sink (spec 2.8).

    sparse_attention(q bf16 [n, heads, 512], swa_cache uint8 [slots, 528], swa_slots int64 [n, window],
                     main_cache uint8 [slots, 288] | None, main_slots int64 [n, k] | None,
                     attn_sink fp32 [heads], scale) -> bf16 [n, heads, 512]

A cache of three dims holds V4 records (records_v4.py), whatever it is for.

Keys are values too. A slot of -1 is no key; a row without keys gives zeros. The sink adds exp(sink) to the
denominator, unscaled, and no value. Scores and the denominator are fp32; P is rounded to bf16 for the product
with V, as in the published code.

Torch form: rows in tiles, each distinct slot of a tile decoded once; used on CPU.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sglang_csa2.kernels.records import decode_main_kv, decode_swa_kv
from sglang_csa2.kernels.records_v4 import read_v4

# Keys per step of the online softmax: P is rounded to bf16 relative to the running maximum of its block.
_BLOCK = 64
# fp32 bytes of gathered keys that a tile of rows may hold.
_TILE_BYTES = 32 << 20


def sparse_attention(
    q: Tensor,
    swa_cache: Tensor,
    swa_slots: Tensor,
    main_cache: Tensor | None,
    main_slots: Tensor | None,
    attn_sink: Tensor,
    scale: float,
) -> Tensor:
    rows, heads, dim = q.shape
    if attn_sink.shape != (heads,):
        raise ValueError(f"attn_sink must have one entry per head ({heads}), got shape {tuple(attn_sink.shape)}")
    if swa_slots.shape[0] != rows or (main_slots is not None and main_slots.shape[0] != rows):
        raise ValueError(f"slot tables must have one row per query row ({rows})")
    keys_per_row = swa_slots.shape[1] + (0 if main_slots is None else main_slots.shape[1])
    tile = max(1, _TILE_BYTES // (keys_per_row * dim * 4))
    out = torch.empty_like(q)
    for start in range(0, rows, tile):
        part = slice(start, start + tile)
        keys, none = _gather(swa_cache, swa_slots[part], read_swa_kv)
        if main_slots is not None:
            main_keys, main_none = _gather(main_cache, main_slots[part], read_main_kv)
            keys, none = torch.cat([keys, main_keys], dim=1), torch.cat([none, main_none], dim=1)
        out[part] = _attend(q[part], keys, none, attn_sink, scale)
    return out


def read_swa_kv(cache: Tensor, slots: Tensor) -> Tensor:
    """bf16 [n, 512] keys of slots that are not negative."""
    return read_v4(cache, slots) if cache.ndim == 3 else decode_swa_kv(cache[slots])


def read_main_kv(cache: Tensor, slots: Tensor) -> Tensor:
    """bf16 [n, 512] keys of slots that are not negative."""
    return read_v4(cache, slots) if cache.ndim == 3 else decode_main_kv(cache[slots])


def _gather(cache: Tensor, slots: Tensor, read) -> tuple[Tensor, Tensor]:
    """fp32 keys [n, k, 512] of a tile, zero where there is none, and the mask of those."""
    distinct, inverse = slots.unique(return_inverse=True)
    values = read(cache, distinct.clamp(min=0)).float()
    values[distinct < 0] = 0
    return values[inverse], slots < 0


def _attend(q: Tensor, keys: Tensor, none: Tensor, attn_sink: Tensor, scale: float) -> Tensor:
    """Online softmax over blocks of keys, in the published code's order and roundings."""
    q = q.float()
    # A finite start keeps a row without keys at exp(-inf) = 0 rather than NaN.
    peak = q.new_full((*q.shape[:2], 1), -1e30)
    denominator, values = torch.zeros_like(peak), torch.zeros_like(q)
    for start in range(0, keys.shape[1], _BLOCK):
        block = keys[:, start : start + _BLOCK]
        scores = torch.bmm(q, block.transpose(1, 2)) * scale
        scores.masked_fill_(none[:, None, start : start + _BLOCK], -math.inf)
        new_peak = torch.maximum(peak, scores.amax(-1, keepdim=True))
        rescale, weights = (peak - new_peak).exp(), (scores - new_peak).exp()
        denominator = denominator * rescale + weights.sum(-1, keepdim=True)
        values = values * rescale + torch.bmm(weights.bfloat16().float(), block)
        peak = new_peak
    denominator = denominator + (attn_sink.float()[None, :, None] - peak).exp()
    return torch.where(none.all(-1)[:, None, None], 0, values / denominator).bfloat16()
