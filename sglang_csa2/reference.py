"""CSA2 in plain torch: slow, readable, the definition that everything else is tested against.

One function per step of spec section 2, on values rather than bytes, for one request at a time. Nothing
here knows of pages, slots or batches, and no kernel imports it. Unless a `dtype` argument says otherwise the
roundings are those of the published code: bf16 tensors, fp32 arithmetic inside a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dim in fp32, rounded once to bf16 (spec 2). x [..., d], weight [d] -> bf16 [..., d]."""
    x = x.float()
    return (weight.float() * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))).bfloat16()


@dataclass(frozen=True)
class Yarn:
    """The YaRN scaling of layers with a compress ratio above 0 (spec 2.2)."""

    factor: float = 16.0
    original_max_position: int = 65536
    beta_fast: float = 32.0
    beta_slow: float = 1.0


def rope_frequencies(dim: int, base: float, yarn: Yarn | None) -> Tensor:
    """fp32 [dim / 2] angular frequencies; `yarn` None gives plain RoPE (spec 2.2)."""
    freqs = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if yarn is None:
        return freqs

    def pair_with(rotations: float) -> float:
        return dim * math.log(yarn.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_with(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_with(yarn.beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return freqs / yarn.factor * ramp + freqs * (1 - ramp)


def rope_table(positions: Tensor, frequencies: Tensor) -> Tensor:
    """complex64 [n, dim / 2]: e^(i * position * frequency), the angle formed in fp32."""
    angles = positions.float()[:, None] * frequencies[None, :]
    return torch.polar(torch.ones_like(angles), angles)


def rotate_tail(x: Tensor, table: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the last `2 * table.shape[-1]` dims as adjacent pairs, one rounding back (spec 2.2).

    x [n, ..., d], table complex64 [n, r / 2] -> like x.
    """
    width = 2 * table.shape[-1]
    head, tail = x[..., :-width], x[..., -width:]
    pairs = torch.view_as_complex(tail.float().unflatten(-1, (-1, 2)).contiguous())
    turn = (table.conj() if inverse else table).reshape(x.shape[0], *[1] * (x.ndim - 2), width // 2)
    return torch.cat([head, torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)], dim=-1)


def round_e2m1(x: Tensor) -> Tensor:
    """Nearest e2m1 value, ties to the even code, saturating at 6; the sign of zero is kept (spec 2.5)."""
    values = torch.tensor(E2M1_VALUES, dtype=torch.float64)
    magnitude = x.double().abs().clamp(max=6.0)
    distance = (magnitude[..., None] - values).abs()
    nearest = distance.min(dim=-1, keepdim=True).values
    is_nearest = distance == nearest
    even = is_nearest & (torch.arange(8) % 2 == 0)
    code = torch.where(even.any(-1), even.int().argmax(-1), is_nearest.int().argmax(-1))
    return torch.copysign(values[code], x.double()).to(x.dtype)


def _power_of_two_above(x: Tensor) -> Tensor:
    """2^ceil(log2 x) of positive fp32 x, from its bits."""
    bits = x.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).int()
    return (exponent << 23).view(torch.float32)


def quantize_swa_kv(x: Tensor) -> Tensor:
    """Values on the SWA grid: e4m3 with one power-of-two scale per 32 (spec 2.3). x [..., d] -> bf16."""
    groups = x.float().unflatten(-1, (-1, 32))
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    scale = _power_of_two_above(amax * torch.tensor(1 / 448, dtype=torch.float32))
    values = (groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    return (values * scale).flatten(-2).bfloat16()


def quantize_main_kv(x: Tensor) -> Tensor:
    """Values on the main KV grid: e2m1 with one e4m3 scale per 16 (spec 2.5). x [..., d] -> bf16."""
    groups = x.float().unflatten(-1, (-1, 16))
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-9)
    scale = (amax / 6).clamp(max=448).to(torch.float8_e4m3fn).float()
    return (round_e2m1((groups / scale).clamp(-6, 6)) * scale).flatten(-2).bfloat16()


def quantize_index(x: Tensor) -> Tensor:
    """Values on the index grid (queries and keys): e2m1, a power-of-two scale per 32 (spec 2.6). -> bf16."""
    groups = x.float().unflatten(-1, (-1, 32))
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-126)
    scale = _power_of_two_above(amax * torch.tensor(1 / 6, dtype=torch.float32))
    return (round_e2m1((groups / scale).clamp(-6, 6)) * scale).flatten(-2).bfloat16()


def pool_pairs(kv: Tensor, score: Tensor) -> Tensor:
    """Per-channel softmax over the two tokens of a group (spec 2.4). fp32 [n, 2, d] each -> fp32 [n, d]."""
    return (kv * score.softmax(dim=1)).sum(dim=1)


def visible_entries(positions: Tensor, ratio: int) -> Tensor:
    """How many compressed entries a query sees: entry j iff j < (position + 1) // ratio (spec 2.6)."""
    return (positions + 1) // ratio


def index_scores(q: Tensor, k: Tensor, weights: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """sum_h relu(q_h . k_t) w_h (spec 2.6).

    q [n, heads, 128], k [entries, 128], weights [n, heads] -> [n, entries]: bf16 with the published code's
    roundings, or computed throughout in `dtype` (float64 to judge a kernel).
    """
    if dtype is not None:
        products = torch.einsum("nhd,td->nht", q.to(dtype), k.to(dtype)).relu()
        return (products * weights.to(dtype)[..., None]).sum(1)
    products = torch.einsum("nhd,td->nht", q.float(), k.float()).bfloat16().relu()
    return (products * weights.bfloat16()[..., None]).float().sum(1).bfloat16()


def select_topk(scores: Tensor, visible: Tensor, topk: int, eligible: Tensor | None = None) -> Tensor:
    """Positions of the `topk` best visible entries, ascending, -1 padded (spec 2.6). Ties: the lower position.

    scores [n, entries], visible [n], eligible bool [n, entries] or None -> int64 [n, topk].
    """
    rows, entries = scores.shape
    allowed = torch.arange(entries)[None, :] < visible[:, None]
    if eligible is not None:
        allowed = allowed & eligible
    chosen = torch.full((rows, topk), -1, dtype=torch.int64)
    for row in range(rows):
        candidates = allowed[row].nonzero().flatten()
        order = scores[row, candidates].sort(descending=True, stable=True).indices[:topk]
        chosen[row, : len(order)] = candidates[order].sort().values
    return chosen


def candidate_mask(scores: Tensor, visible: Tensor, topk_blocks: int, block_size: int) -> Tensor:
    """The pool: entries of the best blocks by block maximum, the newest block always among them (spec 2.7).

    scores [n, entries], visible [n] -> bool [n, entries]. Ties: the lower block. Entries of a kept block that
    are not visible yet are in the mask; `select_topk` leaves them out.
    """
    rows, entries = scores.shape
    mask = torch.zeros(rows, entries, dtype=torch.bool)
    for row in range(rows):
        seen = int(visible[row])
        if seen == 0:
            continue
        blocks = math.ceil(seen / block_size)
        best = [scores[row, b * block_size : min((b + 1) * block_size, seen)].float().max() for b in range(blocks)]
        best[-1] = torch.tensor(math.inf)
        kept = torch.stack(best).sort(descending=True, stable=True).indices[:topk_blocks]
        for block in kept.tolist():
            mask[row, block * block_size : (block + 1) * block_size] = True
    return mask


def sparse_attention(
    q: Tensor, keys: Tensor, indices: Tensor, attn_sink: Tensor, scale: float, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """One softmax over the listed keys with a sink in the denominator; keys are values too (spec 2.8).

    q [n, heads, d], keys [m, d], indices int64 [n, k] into keys with -1 for none, attn_sink [heads] -> `dtype`
    [n, heads, d]. A row without keys gives zeros.
    """
    none = indices < 0
    chosen = keys[indices.clamp(min=0)].to(dtype).masked_fill(none[..., None], 0)
    scores = torch.einsum("nhd,nkd->nhk", q.to(dtype), chosen) * scale
    scores = scores.masked_fill(none[:, None, :], -math.inf)
    sink = attn_sink.to(dtype)[None, :, None].expand(q.shape[0], -1, 1)
    weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("nhk,nkd->nhd", weights, chosen)


def window_indices(positions: Tensor, window: int, *, first: int = 0) -> Tensor:
    """Positions in each query's window, itself included, ascending, none below `first`, -1 padded (spec 2.3)."""
    listed = (positions - window + 1).clamp(min=first)[:, None] + torch.arange(window)
    return listed.masked_fill(listed > positions[:, None], -1)
