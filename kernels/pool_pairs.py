"""Ratio-2 pooling of two tokens into one latent, across chunk borders (spec 2.4).

The odd row of a pair completes it. Its even partner is a row of the same batch, or waits in the request's
pending ring since an earlier forward.

    pool_pairs(kv, score [n, 512] fp32, odd_rows [m], partner_rows [m], pending fp32 [ring rows, 1024],
               pending_reads [m]) -> fp32 [m, 512]
    keep_pending(kv, score, rows [p], pending, ring_rows [p])        writes kv | score of the waiting rows

`partner_rows[i]` is the even row, or -1 to read ring row `pending_reads[i]`. A ring row is kv then score. The
weights are a per-channel softmax over the two tokens, which for two is a logistic of the difference.

Torch form: device-agnostic, used on CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pool_pairs(
    kv: Tensor, score: Tensor, odd_rows: Tensor, partner_rows: Tensor, pending: Tensor, pending_reads: Tensor
) -> Tensor:
    width = kv.shape[-1]
    waiting = pending[pending_reads.clamp(min=0)]
    in_batch = (partner_rows >= 0)[:, None]
    even = partner_rows.clamp(min=0)
    even_kv = torch.where(in_batch, kv[even], waiting[:, :width])
    even_score = torch.where(in_batch, score[even], waiting[:, width:])
    pair_kv = torch.stack([even_kv, kv[odd_rows]], dim=1)
    weights = torch.stack([even_score, score[odd_rows]], dim=1).softmax(dim=1)
    return (pair_kv * weights).sum(dim=1)


def keep_pending(kv: Tensor, score: Tensor, rows: Tensor, pending: Tensor, ring_rows: Tensor) -> None:
    pending[ring_rows] = torch.cat([kv[rows], score[rows]], dim=-1)
