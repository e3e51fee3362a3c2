"""Keys as V4 records and back: 448 e4m3, 64 bf16, 7 ue8m0 (one per 64 dims) and a byte that is not read.

    encode_v4  x [n, 512]                                -> uint8 [n, 584]
    decode_v4  uint8 [..., 584]                          -> bf16 [..., 512]
    write_v4   (cache [pages, slots, 584], slots [n], records)    a negative slot writes nothing
    pages_of   buffer [pages, bytes], slots              -> cache uint8 [pages, slots, 584], a view
    read_v4    (cache [pages, slots, 584], slots [n])    -> bf16 [n, 512]

e4m3 rounds to nearest even under the scale 2^ceil(log2(max(amax, 1e-4) / 448)). The last 64 dims are stored as they
are. What a key loses over the model's own grids, for normal latents (relative, in norm; tests/unit/test_records_v4.py):

| key       | values on the model's grid, then V4 | the latent straight to V4 |
|-----------|-------------------------------------|---------------------------|
| window KV | below 1e-6                          | 0.009                     |
| main KV   | 0.020                               | 0.098                     |

so the stores take the first way.

Torch form: device-agnostic, used on CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_csa2.kernels.records import _FP8_MAX, _ceil_log2, _e4m3_table, _exp2, _exp2_bf16, _ue8m0
from sglang_csa2.layout import V4_FP8_DIMS, V4_KV


def encode_v4(x: Tensor) -> Tensor:
    if x.shape[-1] != V4_KV.dims:
        raise ValueError(f"{V4_KV.name} records hold {V4_KV.dims} values, got a tensor of shape {tuple(x.shape)}")
    groups = x[..., :V4_FP8_DIMS].float().unflatten(-1, (-1, V4_KV.group))
    amax = groups.abs().amax(-1, keepdim=True).clamp_(min=1e-4)
    exponent = _ceil_log2(amax * torch.tensor(1 / _FP8_MAX, dtype=torch.float32, device=x.device))
    data = (groups / _exp2(exponent)).clamp_(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    roped = x[..., V4_FP8_DIMS:].bfloat16().contiguous().view(torch.uint8)
    scales = _ue8m0(exponent)
    return torch.cat([data.flatten(-2), roped, scales, torch.zeros_like(scales[..., :1])], dim=-1)


def decode_v4(records: Tensor) -> Tensor:
    data, scales = records[..., : V4_KV.data_bytes], records[..., V4_KV.data_bytes : -1]
    values = _e4m3_table(records.device)[data[..., :V4_FP8_DIMS].int()].unflatten(-1, (-1, V4_KV.group))
    roped = data[..., V4_FP8_DIMS:].contiguous().view(torch.bfloat16)
    return torch.cat([(values * _exp2_bf16(scales)[..., None]).flatten(-2), roped], dim=-1)


def write_v4(cache: Tensor, slots: Tensor, records: Tensor) -> None:
    live = slots >= 0
    page, offset = _places(cache, slots[live].long())
    data, scales = page_views(cache)
    data[page, offset] = records[live, : V4_KV.data_bytes]
    scales[page, offset] = records[live, V4_KV.data_bytes :]


def read_v4(cache: Tensor, slots: Tensor) -> Tensor:
    page, offset = _places(cache, slots)
    data, scales = page_views(cache)
    return decode_v4(torch.cat([data[page, offset], scales[page, offset]], dim=-1))


def pages_of(buffer: Tensor, slots: int) -> Tensor:
    """A buffer uint8 [pages, bytes] of whole pages as a cache [pages, slots, 584] over the same bytes."""
    return buffer.as_strided((len(buffer), slots, V4_KV.bytes), (buffer.stride(0), V4_KV.bytes, 1))


def page_views(cache: Tensor) -> tuple[Tensor, Tensor]:
    """A cache's data uint8 [pages, slots, 576] and scales [pages, slots, 8], both views."""
    (pages, slots, _), stride = cache.shape, cache.stride(0)
    data = cache.as_strided((pages, slots, V4_KV.data_bytes), (stride, V4_KV.data_bytes, 1))
    scale_offset = cache.storage_offset() + slots * V4_KV.data_bytes
    scales = cache.as_strided((pages, slots, V4_KV.scale_bytes), (stride, V4_KV.scale_bytes, 1), scale_offset)
    return data, scales


def _places(cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    return slots // cache.shape[1], slots % cache.shape[1]
