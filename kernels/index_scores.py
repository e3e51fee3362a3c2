"""Index scores: sum over heads of relu(q . k) w, over paged index K (spec 2.6).

    gather_index_k(cache uint8 [pages, 64 * 68], slots int64 [...]) -> bf16 [..., 128]
    index_scores(q bf16 [b, n, heads, 128], weights bf16 [b, n, heads], keys bf16 [b, entries, 128])
        -> bf16 [b, n, entries]

Roundings are the published code's: each head's product to bf16, relu, times the weight to bf16, the sum over
heads in fp32 and once to bf16. A negative slot reads slot 0; the caller masks its score. Each row's scores
depend on that row and its keys alone, whatever shares the batch.

Torch form: device-agnostic, used on CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_csa2.kernels.records import decode_index_k
from sglang_csa2.kernels.store import index_page_views


def gather_index_k(cache: Tensor, slots: Tensor) -> Tensor:
    slots = slots.clamp(min=0)
    data, scales = index_page_views(cache)
    page, offset = slots // data.shape[1], slots % data.shape[1]
    return decode_index_k(data[page, offset], scales[page, offset])


def index_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    batch, rows, heads, dim = q.shape
    # fp32 operands: values on the FP4 grid multiply exactly and their sums hardly round, so the
    # result does not depend on how a GEMM orders them.
    products = torch.bmm(q.float().view(batch, rows * heads, dim), keys.float().transpose(1, 2))
    products = products.bfloat16().view(batch, rows, heads, -1).relu_()
    return (products * weights.bfloat16()[..., None]).float().sum(dim=2).bfloat16()
