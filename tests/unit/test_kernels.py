"""The torch kernels against the reference, with poison wherever nothing should be read."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_csa2 import reference
from sglang_csa2.kernels import index_scores, records, store, topk
from sglang_csa2.kernels.pool_pairs import keep_pending, pool_pairs
from sglang_csa2.kernels.sparse_attention import sparse_attention
from sglang_csa2.layout import INDEX_PAGE_BYTES, MAIN_KV, SWA_KV

LENGTHS = [0, 1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129, 200]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def poisoned(slots, record):
    """A cache of NaN: e4m3 0x7F and ue8m0 0xFF in every slot."""
    return torch.full((slots, record.bytes), 0x7F, dtype=torch.uint8)


def relative_error(out, expected):
    return ((out.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("visible", LENGTHS)
@pytest.mark.parametrize("k", [1, 64, 512])
def test_topk_properties(visible, k):
    scores = torch.randn(3, 200, generator=generator(visible)).bfloat16()
    seen = torch.tensor([visible, max(visible - 1, 0), 200])
    allowed = torch.arange(200) < seen[:, None]
    chosen = topk.select_topk(scores, allowed, k)
    assert torch.equal(chosen, reference.select_topk(scores, seen, k))
    for row, limit in zip(chosen, seen.tolist(), strict=True):
        picked = row[row >= 0]
        assert len(picked) == min(k, limit) and torch.equal(picked, picked.unique())
        assert torch.equal(row[len(picked) :], torch.full((k - len(picked),), -1))


def test_topk_never_chooses_nan_and_breaks_ties_low():
    scores = torch.tensor([[1.0, math.nan, 1.0, 1.0, 2.0]])
    assert topk.select_topk(scores, torch.ones(1, 5, dtype=torch.bool), 3).tolist() == [[0, 2, 4]]
    assert topk.select_topk(scores, torch.ones(1, 5, dtype=torch.bool), 5).tolist() == [[0, 2, 3, 4, -1]]


def test_topk_of_nothing():
    assert topk.select_topk(torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool), 4).tolist() == [[-1] * 4] * 2


@pytest.mark.parametrize("entries", [1, 7, 8, 9, 17, 129, 200])
@pytest.mark.parametrize("blocks", [1, 4, 16, 64])
def test_candidate_blocks(entries, blocks):
    scores = torch.randn(4, entries, generator=generator(entries)).bfloat16()
    visible = torch.tensor([entries, entries // 2, 1, 0])
    kept = topk.candidate_blocks(scores, visible, blocks, 8)
    mask = torch.zeros(4, entries, dtype=torch.bool)
    listed = topk.block_entries(kept, visible, 8)
    for row in range(4):
        inside = listed[row][listed[row] >= 0]
        assert torch.equal(inside, inside.unique())
        mask[row, inside] = True
    expected = reference.candidate_mask(scores, visible, blocks, 8) & (torch.arange(entries) < visible[:, None])
    assert torch.equal(mask, expected)
    newest = (visible - 1) // 8
    assert all(newest[row] in kept[row] for row in range(3))


def test_candidate_blocks_keep_the_newest_against_better_ones():
    scores = torch.cat([torch.full((1, 16), 5.0), torch.full((1, 1), -5.0)], dim=1)
    assert topk.candidate_blocks(scores, torch.tensor([17]), 2, 8).tolist() == [[0, 2]]


def test_index_scores_are_the_published_ones():
    g = generator(1)
    q = reference.quantize_index(torch.randn(5, 32, 128, generator=g).bfloat16())
    k = reference.quantize_index(torch.randn(77, 128, generator=g).bfloat16())
    w = torch.randn(5, 32, generator=g).bfloat16()
    scores = index_scores.index_scores(q[None], w[None], k[None])[0]
    assert torch.equal(scores, reference.index_scores(q, k, w))


def test_gather_index_k_reads_only_its_slots():
    g = generator(2)
    cache = torch.full((4, INDEX_PAGE_BYTES), 0xFF, dtype=torch.uint8)
    key = torch.randn(3, 128, generator=g).bfloat16()
    table = reference.rope_table(torch.arange(4), reference.rope_frequencies(64, 10000.0, None))
    slots = torch.tensor([1, 64, 200])
    store.index_k_store(key, torch.ones(128), 1e-20, table, torch.arange(3), slots, cache)
    expected = reference.quantize_index(
        reference.rotate_tail(reference.rms_norm(key, torch.ones(128), 1e-20), table[:3])
    )
    assert torch.equal(index_scores.gather_index_k(cache, slots), expected)


def test_pairs_close_across_batches_and_rings():
    g = generator(3)
    kv, score = torch.randn(6, 512, generator=g), torch.randn(6, 512, generator=g)
    pending = torch.full((8, 1024), math.nan)
    keep_pending(kv, score, torch.tensor([0, 3]), pending, torch.tensor([4, 6]))
    odd, partner, reads = torch.tensor([1, 5]), torch.tensor([-1, 4]), torch.tensor([6, 0])
    pooled = pool_pairs(kv, score, odd, partner, pending, reads)
    pairs = [(3, 1), (4, 5)]
    expected = reference.pool_pairs(
        torch.stack([kv[list(pair)] for pair in pairs]), torch.stack([score[list(pair)] for pair in pairs])
    )
    assert torch.allclose(pooled, expected, rtol=1e-6, atol=1e-6) and not pooled.isnan().any()


@pytest.mark.parametrize("heads", [1, 4, 64])
@pytest.mark.parametrize("keys", [0, 1, 63, 64, 65, 129, 192])
def test_sparse_attention(heads, keys):
    g = generator(heads * 1000 + keys)
    rows, slots = 3, 300
    swa, main = poisoned(slots, SWA_KV), poisoned(slots, MAIN_KV)
    used = torch.randperm(slots, generator=g)[: max(keys, 1)]
    values = torch.randn(len(used), 512, generator=g).bfloat16()
    swa[used], main[used] = records.encode_swa_kv(values), records.encode_main_kv(values)
    order = used[torch.argsort(torch.rand(rows, len(used), generator=g), dim=1)]
    swa_slots = torch.full((rows, 192), -1)
    main_slots = torch.full((rows, 192), -1)
    swa_slots[:, :keys] = order[:, :keys]
    main_slots[1:, 192 - keys :] = order[1:, :keys]  # -1 first
    q = torch.randn(rows, heads, 512, generator=g).bfloat16()
    sink = torch.randn(heads, generator=g)
    out = sparse_attention(q, swa, swa_slots, main, main_slots, sink, 512**-0.5)
    assert out.dtype is torch.bfloat16 and not out.isnan().any()
    table = torch.zeros(2 * slots, 512, dtype=torch.float64)
    table[used] = records.decode_swa_kv(swa[used]).double()
    table[slots + used] = records.decode_main_kv(main[used]).double()
    indices = torch.cat([swa_slots, torch.where(main_slots >= 0, main_slots + slots, -1)], dim=1)
    expected = reference.sparse_attention(q, table, indices, sink, 512**-0.5, dtype=torch.float64)
    if keys == 0:
        assert not out.any()
    else:
        # An eager bf16 softmax over the same keys is the yardstick.
        eager = reference.sparse_attention(q, table.bfloat16(), indices, sink, 512**-0.5, dtype=torch.bfloat16)
        assert relative_error(out, expected) <= max(1.5 * relative_error(eager, expected), 1e-3)


def test_sparse_attention_survives_an_overwhelming_sink():
    swa = records.encode_swa_kv(torch.randn(4, 512, generator=generator(5)))
    sink = torch.tensor([1e4, -1e4])
    q = torch.randn(1, 2, 512, generator=generator(6)).bfloat16()
    out = sparse_attention(q, swa, torch.tensor([[0, 1, 2, 3]]), None, None, sink, 512**-0.5)
    assert not out.isnan().any() and not out[0, 0].any() and out[0, 1].any()


def test_sparse_attention_checks_its_shapes():
    q = torch.zeros(2, 4, 512, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="one entry per head"):
        sparse_attention(q, poisoned(1, SWA_KV), torch.full((2, 1), -1), None, None, torch.zeros(3), 1.0)
    with pytest.raises(ValueError, match="one row per query row"):
        sparse_attention(q, poisoned(1, SWA_KV), torch.full((1, 1), -1), None, None, torch.zeros(4), 1.0)
