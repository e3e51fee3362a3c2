"""Pack values into cache records and back (the byte formats of layout.py).

    encode_swa_kv   x [n, 512]  -> uint8 [n, 528]     512 e4m3, then 16 ue8m0 (one per 32 dims)
    encode_main_kv  x [n, 512]  -> uint8 [n, 288]     256 bytes of e2m1 pairs, then 32 e4m3 (one per 16)
    encode_index_k  x [n, 128]  -> uint8 [n, 68]      64 bytes of e2m1 pairs, then 4 ue8m0 (one per 32)
    decode_*        uint8 [..., bytes] -> bf16 [..., dims]

Every rounding is to nearest even, as in spec 2.3, 2.5 and 2.6; decoding is exact in bf16, because an e4m3 or
e2m1 value times its scale needs at most 6 significant bits. Inputs of any float dtype; NaN and infinities are
the caller's fault and encode to arbitrary bytes.

Torch form: device-agnostic, used on CPU.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from sglang_csa2.layout import INDEX_K, MAIN_KV, SWA_KV, Record

_FP8_MAX = 448.0
_FP4_MAX = 6.0
# Above these magnitudes a value takes the next e2m1 code. A tie goes to the even code, so the midpoints that
# lead to an even code belong to it (>=) and the others do not (>).
_E2M1_OPEN_MIDPOINTS = (0.25, 1.25, 2.5, 5.0)
_E2M1_CLOSED_MIDPOINTS = (0.75, 1.75, 3.5)
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def encode_swa_kv(x: Tensor) -> Tensor:
    groups = _groups(x, SWA_KV)
    amax = groups.abs().amax(-1, keepdim=True).clamp_(min=1e-4)
    exponent = _ceil_log2(amax * torch.tensor(1 / _FP8_MAX, dtype=torch.float32, device=x.device))
    data = (groups / _exp2(exponent)).clamp_(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    return torch.cat([data.view(torch.uint8).flatten(-2), _ue8m0(exponent)], dim=-1)


def encode_main_kv(x: Tensor) -> Tensor:
    groups = _groups(x, MAIN_KV)
    amax = groups.abs().amax(-1, keepdim=True).clamp_(min=_FP4_MAX * 2.0**-9)
    scale = (amax / _FP4_MAX).clamp_(max=_FP8_MAX).to(torch.float8_e4m3fn)
    data = _pack_e2m1((groups / scale.float()).flatten(-2))
    return torch.cat([data, scale.view(torch.uint8).flatten(-2)], dim=-1)


def encode_index_k(x: Tensor) -> Tensor:
    groups = _groups(x, INDEX_K)
    amax = groups.abs().amax(-1, keepdim=True).clamp_(min=_FP4_MAX * 2.0**-126)
    exponent = _ceil_log2(amax * torch.tensor(1 / _FP4_MAX, dtype=torch.float32, device=x.device))
    return torch.cat([_pack_e2m1((groups / _exp2(exponent)).flatten(-2)), _ue8m0(exponent)], dim=-1)


def decode_swa_kv(records: Tensor) -> Tensor:
    data, scales = _split(records, SWA_KV)
    values = _e4m3_table(records.device)[data.int()]
    return _scaled(values, _exp2_bf16(scales), SWA_KV)


def decode_main_kv(records: Tensor) -> Tensor:
    data, scales = _split(records, MAIN_KV)
    return _scaled(_unpack_e2m1(data), _e4m3_table(records.device)[scales.int()], MAIN_KV)


def decode_index_k(data: Tensor, scales: Tensor) -> Tensor:
    """Index K keeps data and scales apart in its pages: uint8 [..., 64] and [..., 4] -> bf16 [..., 128]."""
    return _scaled(_unpack_e2m1(data), _exp2_bf16(scales), INDEX_K)


def _groups(x: Tensor, record: Record) -> Tensor:
    if x.shape[-1] != record.dims:
        raise ValueError(f"{record.name} records hold {record.dims} values, got a tensor of shape {tuple(x.shape)}")
    return x.float().unflatten(-1, (-1, record.group))


def _split(records: Tensor, record: Record) -> tuple[Tensor, Tensor]:
    return records[..., : record.data_bytes], records[..., record.data_bytes :]


def _scaled(values: Tensor, scales: Tensor, record: Record) -> Tensor:
    return (values.unflatten(-1, (-1, record.group)) * scales[..., None]).flatten(-2)


def _ceil_log2(x: Tensor) -> Tensor:
    """ceil(log2 x) of positive normal fp32, from its bits: no logarithm, so no rounding of one."""
    bits = x.view(torch.int32)
    return (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).int()


def _exp2(exponent: Tensor) -> Tensor:
    return ((exponent + 127) << 23).view(torch.float32)


def _ue8m0(exponent: Tensor) -> Tensor:
    return (exponent + 127).to(torch.uint8).flatten(-2)


def _exp2_bf16(scales: Tensor) -> Tensor:
    return (scales.to(torch.int16) << 7).view(torch.bfloat16)


def _pack_e2m1(x: Tensor) -> Tensor:
    """Scaled fp32 [..., 2n] -> uint8 [..., n]: sign and code per nibble, the even element low."""
    magnitude = x.abs()
    code = torch.signbit(x).to(torch.uint8) << 3
    for midpoint in _E2M1_OPEN_MIDPOINTS:
        code += magnitude > midpoint
    for midpoint in _E2M1_CLOSED_MIDPOINTS:
        code += magnitude >= midpoint
    return code[..., 0::2] | (code[..., 1::2] << 4)


def _unpack_e2m1(data: Tensor) -> Tensor:
    """uint8 [..., n] -> bf16 [..., 2n], both nibbles by one table look-up."""
    return _e2m1_pair_table(data.device)[data.int()].view(torch.bfloat16)


@functools.cache
def _e2m1_pair_table(device: torch.device) -> Tensor:
    """int32 [256]: the two bf16 values of a byte, the low nibble's in the low half."""
    values = torch.tensor([*_E2M1_VALUES, *(-v for v in _E2M1_VALUES)], dtype=torch.bfloat16)
    byte = torch.arange(256)
    pairs = torch.stack([values[byte & 15], values[byte >> 4]], dim=-1).contiguous()
    return pairs.view(torch.int32).flatten().to(device)


@functools.cache
def _e4m3_table(device: torch.device) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.bfloat16).to(device)
