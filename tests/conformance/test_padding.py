"""Field reports on padding rows, -1, NaN, stale pages and slot 0 (docs/conformance.md has the table)."""

from __future__ import annotations

import math

import pytest
import torch
from harness import POISON, Bench, Request, expected, relative_error

from sglang_csa2.kernels import records, store, topk
from sglang_csa2.kernels.sparse_attention import sparse_attention
from sglang_csa2.layout import INDEX_PAGE_BYTES, MAIN_KV, SWA_KV
from sglang_csa2.metadata import PageTables, build_decode_metadata

SMALL = {"candidate_topk_blocks": 2, "index_topk": 4}


def test_the_null_page_is_never_written_or_needed():
    """vllm-project/vllm#57156: padding wrote NaN into the null block 0, and a clamped -1 read it.

    https://github.com/vllm-project/vllm/issues/57156
    """
    bench = Bench(pages=4, **SMALL)
    request = Request.draw(24, seed=1, slot=2)
    bench.forward([(request, 21)])
    for _ in range(3):
        bench.forward([(request, 1)], "DECODE")
    for layer in bench.plan.layers:
        assert (bench.pool.swa_cache(layer.layer_id)[:256] == POISON).all()
        if layer.writes_cache:
            assert (bench.pool.main_cache(layer.layer_id)[: 256 // layer.ratio] == POISON).all()
            assert (bench.pool.index_cache(layer.layer_id)[: 256 // layer.ratio // 64] == POISON).all()
    for layer_id, out in expected(bench, request).outputs.items():
        assert relative_error(bench.output(request, layer_id), out) < 5e-3


@pytest.mark.parametrize("name", ["swa", "main", "index"])
def test_a_negative_slot_stores_nothing(name):
    """vllm-project/vllm#57156, the store's side: row 0 and the last row stay as they were.

    https://github.com/vllm-project/vllm/issues/57156
    """
    rows, table = 3, torch.ones(8, 32, dtype=torch.complex64)
    slots, positions = torch.tensor([-1, 5, -1]), torch.tensor([0, 1, 2])
    if name == "index":
        cache = torch.full((2, INDEX_PAGE_BYTES), POISON, dtype=torch.uint8)
        store.index_k_store(torch.randn(rows, 128), torch.ones(128), 1e-20, table, positions, slots, cache)
        data, scales = store.index_page_views(cache)
        flat = torch.cat([data, scales], -1).flatten(0, 1)
    elif name == "main":
        flat = torch.full((16, MAIN_KV.bytes), POISON, dtype=torch.uint8)
        store.main_kv_store(torch.randn(rows, 512), table, positions, slots, flat)
    else:
        flat = torch.full((16, SWA_KV.bytes), POISON, dtype=torch.uint8)
        store.swa_store(torch.randn(rows, 512), torch.ones(512), 1e-20, table, positions, slots, flat)
    assert (flat != POISON).any(-1).nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize("width", [70, 600])
@pytest.mark.parametrize("k", [64, 65, 512])
def test_nan_scores_never_become_indices(width, k):
    """vllm-project/vllm#49896, DeepSelect's README: NaN scores gave index 0x7FC00000, or stopped the context.

    https://github.com/vllm-project/vllm/issues/49896 https://github.com/deepseek-ai/DeepSelect
    """
    scores = torch.randn(3, width, generator=torch.Generator().manual_seed(k))
    scores[0, ::3] = math.nan
    scores[1] = math.nan
    visible = torch.tensor([width, width, width - 1])
    chosen = topk.select_topk(scores, torch.arange(width) < visible[:, None], k)
    for row, line in enumerate(chosen.tolist()):
        kept = [index for index in line if index >= 0]
        assert all(index < int(visible[row]) and not math.isnan(scores[row, index]) for index in kept)
        assert kept == sorted(set(kept)) and line == kept + [-1] * (k - len(kept))
    assert (chosen[1] == -1).all()
    blocks = topk.candidate_blocks(scores, visible, 4, 8)
    assert blocks.min() >= -1 and blocks.max() <= (width - 1) // 8
    assert all((int(count) - 1) // 8 in blocks[row].tolist() for row, count in enumerate(visible))


@pytest.mark.parametrize("absent", [16, 63, 64, 128])
def test_a_row_that_starts_with_minus_one_equals_its_compacted_form(absent):
    """vllm-project/vllm#48364: a list whose first indices are all -1 gave NaN; without any key: zeros.

    https://github.com/vllm-project/vllm/issues/48364
    """
    g = torch.Generator().manual_seed(absent)
    cache = records.encode_swa_kv(torch.randn(32, 512, generator=g))
    cache[0] = POISON
    q, sink = torch.randn(2, 4, 512, generator=g).bfloat16(), torch.randn(4, generator=g)
    listed = torch.arange(1, 17)
    slots = torch.full((2, absent + 16), -1)
    slots[0, absent:] = listed
    out = sparse_attention(q, cache, slots, None, None, sink, 512**-0.5)
    compact = sparse_attention(q[:1], cache, listed[None], None, None, sink, 512**-0.5)
    assert relative_error(out[:1], compact) < 5e-3
    assert not out[1].any() and not out.isnan().any()


@pytest.mark.parametrize("garbage", [0, 1, 12_000, 1 << 40, -5])
def test_padding_rows_of_a_captured_decode_neither_read_nor_write(garbage):
    """sgl-project/sglang#31270, vllm-project/vllm#56771, #51970: padding rows with length 0, 1 or garbage.

    https://github.com/sgl-project/sglang/issues/31270 https://github.com/vllm-project/vllm/issues/56771
    https://github.com/vllm-project/vllm/issues/51970
    """
    # The host's table starts as zeros; a row's stale entries lie inside the pool.
    table = torch.zeros(4, 512, dtype=torch.int32)
    table[2, :256] = torch.arange(256, 512)
    meta = build_decode_metadata(
        tables=PageTables(table, torch.arange(1024)), request_slots=torch.tensor([2, 0, 1 << 20]),
        seq_lens=torch.tensor([40, garbage, garbage]), out_slots=torch.tensor([295, 0, 0]), window=128,
        ratios=(1, 2), pending_ring=2, longest=512,
    )  # fmt: skip
    assert meta.positions.tolist() == [39, -1, -1]
    assert (meta.swa_slots[1:] == -1).all() and (meta.swa_out_slots[1:] == -1).all()
    assert meta.requests.tolist() == [2, 0, 0]
    for ratio, rows in meta.ratios.items():
        assert rows.visible.tolist() == [40 // ratio, 0, 0]
        assert (rows.entry_slots[1:] == -1).all() and (rows.out_slots[1:] == -1).all()


def test_nan_in_one_row_stays_in_it():
    """flashinfer-ai/flashinfer#3057, vllm-project/vllm#40047: NaN in a padded row reached real rows.

    https://github.com/flashinfer-ai/flashinfer/issues/3057 https://github.com/vllm-project/vllm/issues/40047
    """
    outputs, records_of_good = [], []
    for poisoned in (False, True):
        bench = Bench(pages=4, **SMALL)
        good, bad = Request.draw(20, seed=1, slot=1), Request.draw(20, seed=2, slot=2)
        if poisoned:
            for data in bad.inputs:
                for rows in vars(data).values():
                    rows.fill_(math.nan)
        check, bench.run_layer = bench.run_layer, None
        bench.run_layer = lambda *args, _check=check: _check(*args, check=False)
        bench.forward([(bad, 19), (good, 19)])
        bench.forward([(good, 1), (bad, 1)], "DECODE")
        outputs.append([bench.output(good, layer_id) for layer_id in range(10)])
        records_of_good.append(bench.cache_bytes(good))
        # What the bad request keeps is poisoned, or nothing was tried.
        decode = {"swa": records.decode_swa_kv, "main": records.decode_main_kv}
        for name, kept in bench.cache_bytes(bad).items():
            if kind := decode.get(name.partition(".")[2]):
                assert kind(kept).isnan().all() == poisoned, name
        assert bench.output(bad, 9).isnan().all() == poisoned
    for clean, beside_nan in zip(*outputs, strict=True):
        assert torch.equal(clean, beside_nan) and not clean.isnan().any()
    assert all(torch.equal(records_of_good[1][name], kept) for name, kept in records_of_good[0].items())


def test_an_empty_extend_beside_a_live_one():
    """vllm-project/vllm#51486, #52339: a prefill chunk of no rows failed an assertion in the kernel.

    https://github.com/vllm-project/vllm/issues/51486 https://github.com/vllm-project/vllm/issues/52339
    """
    bench = Bench(pages=4, **SMALL)
    live, empty = Request.draw(20, seed=1, slot=1), Request.draw(20, seed=2, slot=2)
    bench.forward([(empty, 5), (live, 9)])
    bench.forward([(empty, 0), (live, 10)])
    bench.forward([(live, 0), (empty, 6)], "MIXED")
    for request in (live, empty):
        for layer_id, out in expected(bench, request).outputs.items():
            assert relative_error(bench.output(request, layer_id), out) < 5e-3


def test_a_forward_without_rows_does_nothing():
    """sgl-project/sglang#39899: an idle rank with zero tokens indexed -1.

    https://github.com/sgl-project/sglang/issues/39899
    """
    bench = Bench(pages=4, **SMALL)
    empty = Request.draw(4, seed=1, slot=1)
    bench.forward([(empty, 2)])
    before = bench.cache_bytes(empty)
    bench.forward([(empty, 0)])
    after = bench.cache_bytes(empty)
    assert all(torch.equal(after[name], owned) for name, owned in before.items())
    assert all(bench.output(empty, layer_id).shape[0] == 2 for layer_id in range(10))
