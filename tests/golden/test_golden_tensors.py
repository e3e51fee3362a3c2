"""The reference and the torch kernels against tensors of the published code."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from served import GOLDEN

from sglang_csa2 import reference
from sglang_csa2.kernels import index_scores, records, topk
from sglang_csa2.kernels.sparse_attention import sparse_attention

ATTENTION = load_file(GOLDEN / "tiny-dsv41" / "attention.safetensors")
INDEXER = load_file(GOLDEN / "tiny-dsv41" / "indexer.safetensors")
ROWS = INDEXER["rows"].long()
SCALE, WINDOW_KEYS = 512**-0.5, 257


def relative_error(out, expected):
    return ((out.double() - expected.double()).norm() / expected.double().norm()).item()


def attention_inputs(layer):
    return [ATTENTION[f"layer{layer}.{name}"] for name in ("q", "kv", "indices", "attn_sink", "out")]


@pytest.mark.parametrize("layer", [0, 2, 5, 9])
def test_attention_reference(layer):
    q, kv, indices, sink, out = attention_inputs(layer)
    assert relative_error(reference.sparse_attention(q, kv, indices.long(), sink, SCALE), out) < 1e-2


@pytest.mark.parametrize("layer", [0, 2, 5, 9])
def test_attention_kernel_over_packed_records(layer):
    """The golden keys lie on their grids, so packing loses nothing and the outputs agree almost to the bit."""
    q, kv, indices, sink, out = attention_inputs(layer)
    window, main = kv[:WINDOW_KEYS], kv[WINDOW_KEYS:]
    swa_cache, main_cache = records.encode_swa_kv(window), records.encode_main_kv(main)
    assert torch.equal(records.decode_swa_kv(swa_cache), window)
    assert torch.equal(records.decode_main_kv(main_cache), main)
    indices = indices.long()
    swa_slots, main_slots = indices[:, :128], indices[:, 128:]
    main_slots = torch.where(main_slots >= 0, main_slots - WINDOW_KEYS, -1)
    mine = sparse_attention(q, swa_cache, swa_slots, main_cache, main_slots, sink, SCALE)
    assert (mine != out).float().mean() < 1e-3


@pytest.mark.parametrize("layer", [2, 5, 7, 9])
def test_selection_by_threshold(layer):
    """Every chosen score is at least every other eligible one: the golden choice by our scores, and ours."""
    q, k, w, golden = (INDEXER[f"layer{layer}.{name}"] for name in ("index_q", "index_k", "weights", "selected"))
    scores = index_scores.index_scores(q[None], w[None], k[None])[0]
    visible = reference.visible_entries(ROWS, 2 if layer == 2 else 1)
    allowed = torch.arange(k.shape[0]) < visible[:, None]
    if layer > 5:
        allowed &= INDEXER["layer5.candidates"].bool()
    for chosen in (golden.long(), topk.select_topk(scores, allowed, 64)):
        for row in range(len(ROWS)):
            picked = chosen[row][chosen[row] >= 0]
            assert len(picked) == min(64, int(allowed[row].sum())) and allowed[row, picked].all()
            left = allowed[row].clone()
            left[picked] = False
            assert not left.any() or not len(picked) or scores[row, picked].min() >= scores[row, left].max()


def test_candidate_pool():
    q, k, w = (INDEXER[f"layer5.{name}"] for name in ("index_q", "index_k", "weights"))
    scores = index_scores.index_scores(q[None], w[None], k[None])[0]
    visible = reference.visible_entries(ROWS, 1)
    entries = topk.block_entries(topk.candidate_blocks(scores, visible, 16, 8), visible, 8)
    mask = torch.zeros(len(ROWS), k.shape[0] + 1, dtype=torch.bool)
    mask.scatter_(1, torch.where(entries >= 0, entries, k.shape[0]), True)
    seen = torch.arange(k.shape[0]) < visible[:, None]
    assert torch.equal(mask[:, :-1], INDEXER["layer5.candidates"].bool() & seen)
