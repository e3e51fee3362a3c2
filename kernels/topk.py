"""Top-K by score and the candidate pool by block maximum (spec 2.6, 2.7).

    select_topk(scores [n, entries], allowed bool [n, entries], k) -> int64 [n, k]
    candidate_blocks(scores [n, entries], visible int64 [n], topk_blocks, block_size) -> int64 [n, topk_blocks]
    block_entries(blocks int64 [n, b], visible int64 [n], block_size) -> int64 [n, b * block_size]

Results are ascending, unique, inside the allowed range and padded with -1 at the end (`block_entries` keeps a
-1 wherever a block is absent or an entry not visible yet). Ties go to the lower position, so a row's choice
depends on that row alone. A NaN score is never chosen. The block that holds a row's newest entry is always in
its pool and counts as one of `topk_blocks`.

Torch form: device-agnostic, used on CPU.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def select_topk(scores: Tensor, allowed: Tensor, k: int) -> Tensor:
    rows, entries = scores.shape
    chosen = torch.full((rows, k + 1), -1, dtype=torch.int64, device=scores.device)
    if entries:
        keep = _best(scores.float(), allowed & (scores == scores), k)
        rank = torch.where(keep, keep.cumsum(-1) - 1, k)
        positions = torch.arange(entries, device=scores.device).expand(rows, -1)
        chosen.scatter_(1, rank, positions)
    return chosen[:, :k]


def candidate_blocks(scores: Tensor, visible: Tensor, topk_blocks: int, block_size: int) -> Tensor:
    rows, entries = scores.shape
    blocks = math.ceil(entries / block_size)
    seen = torch.arange(entries, device=scores.device)[None, :] < visible[:, None]
    masked = scores.float().masked_fill(~seen | (scores != scores), -math.inf)
    padded = torch.nn.functional.pad(masked, (0, blocks * block_size - entries), value=-math.inf)
    best = padded.view(rows, blocks, block_size).amax(-1)
    block = torch.arange(blocks, device=scores.device)[None, :]
    newest = (visible[:, None] - 1) // block_size
    best = torch.where(block == newest, math.inf, best)
    return select_topk(best, (block <= newest) & (visible[:, None] > 0), topk_blocks)


def block_entries(blocks: Tensor, visible: Tensor, block_size: int) -> Tensor:
    entries = blocks[..., None] * block_size + torch.arange(block_size, device=blocks.device)
    absent = (blocks[..., None] < 0) | (entries >= visible[:, None, None])
    return entries.masked_fill(absent, -1).flatten(1)


def _best(scores: Tensor, allowed: Tensor, k: int) -> Tensor:
    """Mask of the k best allowed entries per row: all above the k-th value, then the lowest positions at it."""
    if scores.shape[1] <= k:
        return allowed
    scores = scores.masked_fill(~allowed, -math.inf)
    threshold = scores.topk(k, dim=-1).values[:, -1:]
    above = scores > threshold
    tied = (scores == threshold) & allowed
    room = k - above.sum(-1, keepdim=True)
    return above | (tied & (tied.cumsum(-1) <= room))
