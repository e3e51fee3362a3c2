"""Index scores through the library DeepGEMM on SM100: every entry of a row, or the entries of its blocks.

    scan_scores(q bf16 [n, heads, 128], weights bf16 [n, heads], cache uint8 [pages, 128 * 68], page_table int32
                [n, pages], visible int [n], width) -> fp32 [n, width]       arbitrary past the visible entries
    block_scores(same, visible, blocks int32 [n, b])     -> fp32 [n, b * 8]  -inf where absent

q holds values on the FP4 grid, so that packing it again loses nothing. `page_table[i, p]` is the index-K page of row
i's entries 128 p to 128 p + 127. `blocks` are ascending, -1 padded. The library scores in bf16 here: its form of
blocks has no other, and the published code's scores are bf16 too.

Each call makes the library's schedule anew from the rows' lengths, in the stream: a graph replays the making.

Not run on hardware: written against the signatures of sgl-deep-gemm 0.2.3 and the checks in its binary, which are
repeated here so that a wrong shape is an error of ours and not a fault on the card.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from sglang_csa2.kernels.records import encode_index_k
from sglang_csa2.layout import DEEP_GEMM_INDEX_PAGE_SLOTS, INDEX_K

BLOCK_ENTRIES = 8
PAGE_SLOTS = DEEP_GEMM_INDEX_PAGE_SLOTS
# Past a row's blocks the library's table holds this.
_NO_BLOCK = 2**31 - 1
_HEADS = (32, 64)
FUNCTIONS = (
    "fp8_fp4_paged_mqa_logits",
    "get_paged_mqa_logits_metadata",
    "fp8_fp4_paged_sparse_mqa_logits",
    "get_paged_sparse_mqa_logits_metadata",
)


def missing(capability: int) -> str | None:
    """Why DeepGEMM cannot score on a card of this compute capability (90 for 9.0) here, or None if it can."""
    if capability not in (100, 103):
        return (
            f"DeepGEMM's sparse index scores need compute capability 10.0 or 10.3, this card has {capability / 10:.1f}"
        )
    if importlib.util.find_spec("deep_gemm") is None:
        return "the package sgl-deep-gemm is not installed"
    try:
        import deep_gemm
    except (ImportError, OSError, RuntimeError) as error:
        return f"the installed sgl-deep-gemm does not load: {error}"
    absent = [name for name in FUNCTIONS if not callable(getattr(deep_gemm, name, None))]
    return f"the installed sgl-deep-gemm lacks {', '.join(absent)}" if absent else None


def scan_scores(q: Tensor, weights: Tensor, cache: Tensor, page_table: Tensor, visible: Tensor, width: int) -> Tensor:
    import deep_gemm

    check(q, weights, cache, page_table, visible)
    lengths = visible.int()[:, None].contiguous()
    schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, PAGE_SLOTS, _multiprocessors(q.device))
    return deep_gemm.fp8_fp4_paged_mqa_logits(
        _packed(q),
        _keys(cache),
        weights.contiguous(),
        lengths,
        page_table,
        schedule,
        width,
        clean_logits=False,
        logits_dtype=torch.bfloat16,
    ).float()


def block_scores(
    q: Tensor, weights: Tensor, cache: Tensor, page_table: Tensor, visible: Tensor, blocks: Tensor
) -> Tensor:
    import deep_gemm

    check(q, weights, cache, page_table, visible, blocks)
    packed, rows = _packed(q), torch.arange(len(q), dtype=torch.int32, device=q.device)
    table = blocks.masked_fill(blocks < 0, _NO_BLOCK).contiguous()
    schedule = deep_gemm.get_paged_sparse_mqa_logits_metadata(
        visible.int().contiguous(), page_table, rows, PAGE_SLOTS, table, packed[0].dtype, BLOCK_ENTRIES
    )
    scores = deep_gemm.fp8_fp4_paged_sparse_mqa_logits(
        packed, _keys(cache), weights.contiguous(), schedule, blocks.shape[1], BLOCK_ENTRIES
    )
    entry = blocks[:, :, None] * BLOCK_ENTRIES + torch.arange(BLOCK_ENTRIES, device=blocks.device)
    absent = (blocks[:, :, None] < 0) | (entry >= visible[:, None, None])
    return scores[:, : absent[0].numel()].float().masked_fill(absent.flatten(1), -torch.inf)


def check(
    q: Tensor, weights: Tensor, cache: Tensor, page_table: Tensor, visible: Tensor, blocks: Tensor | None = None
) -> None:
    rows, heads = q.shape[:2]
    if q.shape[2:] != (INDEX_K.dims,) or heads not in _HEADS or q.dtype is not torch.bfloat16:
        raise ValueError(f"q must be bf16 [rows, 32 or 64, {INDEX_K.dims}], got {q.dtype} {list(q.shape)}")
    if weights.shape != (rows, heads) or weights.dtype is not torch.bfloat16:
        raise ValueError(f"weights must be bf16 [{rows}, {heads}], got {weights.dtype} {list(weights.shape)}")
    if cache.ndim != 2 or cache.shape[1] != PAGE_SLOTS * INDEX_K.bytes or cache.dtype is not torch.uint8:
        raise ValueError(
            f"cache must be uint8 [pages, {PAGE_SLOTS} * {INDEX_K.bytes}], got {cache.dtype} {list(cache.shape)}: "
            "DeepGEMM takes index pages a multiple of 512 bytes apart"
        )
    if page_table.ndim != 2 or len(page_table) != rows or page_table.dtype is not torch.int32:
        raise ValueError(f"page_table must be int32 [{rows}, pages], got {page_table.dtype} {list(page_table.shape)}")
    if page_table.stride(1) != 1:
        raise ValueError(f"page_table must be contiguous in its last dim, got strides {page_table.stride()}")
    if visible.shape != (rows,):
        raise ValueError(f"visible must be int [{rows}], got {list(visible.shape)}")
    if blocks is not None and (blocks.ndim != 2 or len(blocks) != rows or blocks.dtype is not torch.int32):
        raise ValueError(f"blocks must be int32 [{rows}, any], got {blocks.dtype} {list(blocks.shape)}")


def _packed(q: Tensor) -> tuple[Tensor, Tensor]:
    """q as the library takes it: e2m1 pairs int8 [n, 1, heads, 64], four ue8m0 in an int32 [n, 1, heads]."""
    records = encode_index_k(q)[:, None]
    data = records[..., : INDEX_K.data_bytes].contiguous().view(torch.int8)
    return data, records[..., INDEX_K.data_bytes :].contiguous().view(torch.int32)[..., 0]


def _keys(cache: Tensor) -> Tensor:
    return cache.view(len(cache), PAGE_SLOTS, 1, INDEX_K.bytes)


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
