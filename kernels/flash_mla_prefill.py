"""Sparse attention over a bf16 workspace through the library FlashMLA (spec 2.8).

    sparse_prefill(q bf16 [n, heads, 512], kv bf16 [m, 512], indices int32 [n, k], lengths int32 [n] | None,
                   attn_sink fp32 [heads], scale) -> bf16 [n, heads, 512]

Row i attends to `kv[indices[i, :lengths[i]]]`, -1 being no key; keys are values too. The contract is that of
`reference.sparse_attention`. The library's kernel takes k in multiples of 128 and 64 or 128 heads: fewer heads run
in a copy of q padded to 64, some rows at a time.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util

import torch
from torch import Tensor

INDEX_MULTIPLE = 128
_HEADS = (64, 128)
# Rows per padded copy: 256 MiB of queries.
_PADDED_ROWS = 4096


def missing(capability: int) -> str | None:
    """Why the library's kernel cannot run on a card of this compute capability (90 for 9.0), or None if it can."""
    if capability not in (90, 100, 103):
        return f"FlashMLA has no sparse prefill kernel for compute capability {capability / 10}"
    if importlib.util.find_spec("flash_mla") is None:
        return "the package sgl-flash-mla is not installed"
    return None


def sparse_prefill(
    q: Tensor, kv: Tensor, indices: Tensor, lengths: Tensor | None, attn_sink: Tensor, scale: float
) -> Tensor:
    from flash_mla import flash_mla_sparse_fwd

    _check(q, kv, indices, lengths, attn_sink)
    # The kernels of sm_90 live on in the library's older half.
    options = {"use_legacy": torch.cuda.get_device_capability(q.device)[0] == 9, "return_log2_lse": False}
    heads = q.shape[1]
    if heads in _HEADS:
        return flash_mla_sparse_fwd(q, kv[:, None], indices[:, None], scale, 512, attn_sink, lengths, **options)[0]
    whole = next(size for size in _HEADS if size > heads)
    padded_sink = attn_sink.new_zeros(whole)
    padded_sink[:heads] = attn_sink
    out = torch.empty_like(q)
    for top in range(0, q.shape[0], _PADDED_ROWS):
        part = slice(top, top + _PADDED_ROWS)
        padded = torch.nn.functional.pad(q[part], (0, 0, 0, whole - heads))
        some = lengths if lengths is None else lengths[part]
        out[part] = flash_mla_sparse_fwd(
            padded, kv[:, None], indices[part, None], scale, 512, padded_sink, some, **options
        )[0][:, :heads]
    return out


def _check(q: Tensor, kv: Tensor, indices: Tensor, lengths: Tensor | None, attn_sink: Tensor) -> None:
    rows, heads = q.shape[:2]
    if q.shape[2:] != (512,) or q.dtype is not torch.bfloat16 or not 1 <= heads <= _HEADS[-1]:
        raise ValueError(f"q must be bf16 [rows, 1 to {_HEADS[-1]}, 512], got {q.dtype} {list(q.shape)}")
    if kv.ndim != 2 or kv.shape[1] != 512 or kv.dtype is not torch.bfloat16 or not kv.is_contiguous():
        raise ValueError(f"kv must be contiguous bf16 [keys, 512], got {kv.dtype} {list(kv.shape)}: copy it first")
    if indices.shape[0] != rows or indices.dtype is not torch.int32 or indices.shape[1] % INDEX_MULTIPLE:
        raise ValueError(
            f"indices must be int32 [{rows}, a multiple of {INDEX_MULTIPLE}], got {indices.dtype} "
            f"{list(indices.shape)}: pad with -1"
        )
    if lengths is not None and (lengths.shape != (rows,) or lengths.dtype is not torch.int32):
        raise ValueError(f"lengths must be int32 [{rows}], got {lengths.dtype} {list(lengths.shape)}")
    if attn_sink.shape != (heads,) or attn_sink.dtype is not torch.float32:
        raise ValueError(f"attn_sink must be fp32 [{heads}], got {attn_sink.dtype} {list(attn_sink.shape)}")
