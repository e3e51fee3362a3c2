"""RMSNorm and rotary embedding, the prologue of every store (spec 2, 2.2).

    rms_norm(x [..., d], weight [d], eps)      -> bf16 [..., d]   fp32 inside, one rounding
    rotate_tail(x [n, ..., d], table [n, r/2]) -> like x          adjacent pairs of the last r dims, fp32 inside

`table` is complex64, e^(i angle) per row. Torch form: device-agnostic, used on CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    inverse_rms = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * inverse_rms * weight.float()).bfloat16()


def rotate_tail(x: Tensor, table: Tensor) -> Tensor:
    width = 2 * table.shape[-1]
    out = x.clone()
    pairs = x[..., -width:].float().unflatten(-1, (-1, 2))
    real, imag = pairs.unbind(-1)
    shape = (x.shape[0], *[1] * (x.ndim - 2), width // 2)
    cos, sin = table.real.reshape(shape), table.imag.reshape(shape)
    turned = torch.stack([real * cos - imag * sin, real * sin + imag * cos], dim=-1)
    out[..., -width:] = turned.flatten(-2).to(x.dtype)
    return out
