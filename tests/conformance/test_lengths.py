"""Field reports on lengths, widths and memory (docs/conformance.md has the table)."""

from __future__ import annotations

import math

import pytest
import torch
from harness import Bench, Request, expected, relative_error, tiny_config
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_csa2.indexer import TorchIndexer
from sglang_csa2.kernels import index_scores, records, store, topk
from sglang_csa2.kernels.sparse_attention import sparse_attention
from sglang_csa2.layer_plan import LayerPlan
from sglang_csa2.layout import INDEX_K, INDEX_PAGE_BYTES, MAIN_KV, SWA_KV
from sglang_csa2.metadata import PageTables, build_decode_metadata, build_metadata

LIMIT = 1 << 31


class Allocations(TorchDispatchMode):
    """The largest tensor that any operation made, in bytes, and the bytes of all."""

    largest = total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            # A view owns nothing.
            if isinstance(tensor, torch.Tensor) and not tensor._is_view():
                size = tensor.numel() * tensor.element_size()
                self.largest, self.total = max(self.largest, size), self.total + size
        return result


def wide_tables(context: int) -> PageTables:
    """One row that serves every request, as wide as the context."""
    return PageTables(torch.arange(256, 256 + context, dtype=torch.int32)[None], torch.arange(context + 512))


def decode_allocations(context: int, length: int, build) -> Allocations:
    tables, batch = wide_tables(context), 256
    table = PageTables(tables.req_to_token.expand(batch, -1), tables.full_to_swa)
    slots = torch.full((batch,), length + 255)
    with Allocations() as seen:
        build(table, batch, length, slots, context)
    return seen


def fixed(tables, batch, length, slots, context):
    build_decode_metadata(
        tables=tables, request_slots=torch.arange(batch), seq_lens=torch.full((batch,), length), out_slots=slots,
        window=128, ratios=(1, 2), pending_ring=2, longest=context,
    )  # fmt: skip


def ordinary(tables, batch, length, slots, context):
    build_metadata(
        tables=tables, request_slots=torch.arange(batch), row_counts=[1] * batch, seq_lens=[length] * batch,
        out_slots=slots, window=128, ratios=(1, 2), pending_ring=2,
    )  # fmt: skip


@pytest.mark.parametrize("build", [fixed, ordinary])
def test_metadata_has_no_rows_by_context_temporary(build):
    """sgl-project/sglang#39979: 256 requests at a context of 1M made a 12 GiB slot map.

    https://github.com/sgl-project/sglang/issues/39979
    """
    assert decode_allocations(1 << 20, 1 << 20, build).largest <= 256 * 128 * 8


@pytest.mark.parametrize("build", [fixed, ordinary])
def test_metadata_costs_the_live_length_not_the_captured_bound(build):
    """sgl-project/sglang#40441: a context length of 1M made prompts of 2,048 slow.

    https://github.com/sgl-project/sglang/issues/40441
    """
    short, long = (decode_allocations(context, 2048, build).total for context in (4096, 1 << 20))
    assert short == long


def test_a_long_scan_is_tiled():
    """sgl-project/sglang#33246, #33297: per-head scores of a prompt above 128K tokens did not fit.

    https://github.com/sgl-project/sglang/issues/33246 https://github.com/sgl-project/sglang/issues/33297
    """
    context, rows = 131_073, 6
    plan = LayerPlan.from_config(tiny_config())
    tables = wide_tables(context + 255)
    meta = build_metadata(
        tables=tables, request_slots=torch.tensor([0]), row_counts=[rows], seq_lens=[context],
        out_slots=torch.arange(256 + context - rows, 256 + context), window=128, ratios=(1, 2), pending_ring=2,
    )  # fmt: skip
    g = torch.Generator().manual_seed(1)
    q, weights = torch.randn(rows, 32, 128, generator=g).bfloat16(), torch.randn(rows, 32, generator=g).bfloat16()
    cache = torch.randint(0, 120, (context // 64 + 8, INDEX_PAGE_BYTES), generator=g, dtype=torch.uint8)
    with Allocations() as seen:
        TorchIndexer(plan).choose(plan[5], q, weights, cache, meta)
    chosen = meta.selection.topk[5]
    assert (chosen.positions >= 0).all() and (chosen.positions < context).all()
    assert torch.equal(chosen.slots, chosen.positions + 256)
    # The keys of one request as fp32 and the budget of one tile; every row with every head at once would be 100 MB.
    keys = context * 128 * 4
    assert seen.largest <= keys + 4096 < rows * 32 * context * 4


@pytest.mark.parametrize("width", [511, 512, 513, 16383, 16384, 16385, 32768, 32769, 131_073])
@pytest.mark.parametrize("k", [192, 512, 1152])
def test_topk_at_every_width(width, k):
    """sgl-project/sglang#37892, #33986, vllm-project/vllm#56837: widths and k's that kernels did not know.

    https://github.com/sgl-project/sglang/issues/37892 https://github.com/vllm-project/vllm/issues/56837
    """
    scores = torch.randn(2, width, generator=torch.Generator().manual_seed(width)).bfloat16()
    visible = torch.tensor([width, width - 1])
    chosen = topk.select_topk(scores, torch.arange(width) < visible[:, None], k)
    for row, count in enumerate(visible.tolist()):
        best = sorted(range(count), key=lambda i, row=row: (-float(scores[row, i]), i))[:k]
        assert chosen[row].tolist() == sorted(best) + [-1] * (k - len(best))


def test_a_length_past_the_table_is_an_error_and_not_a_read():
    """sgl-project/sglang#34718: a length past the table's row read foreign memory.

    https://github.com/sgl-project/sglang/issues/34718
    """
    tables = wide_tables(512)
    arguments = {"tables": tables, "request_slots": torch.tensor([0]), "row_counts": [1], "window": 128,
                 "out_slots": torch.tensor([700]), "ratios": (1, 2), "pending_ring": 2}  # fmt: skip
    build_metadata(seq_lens=[512], **arguments)
    with pytest.raises(IndexError):
        build_metadata(seq_lens=[513], **arguments)


def test_one_prefill_of_mixed_lengths():
    """sgl-project/sglang#31023, #32467: several lengths in one prefill, where a barrier was missing.

    https://github.com/sgl-project/sglang/issues/31023 https://github.com/sgl-project/sglang/issues/32467
    """
    bench = Bench(pages=8, candidate_topk_blocks=2, index_topk=4)
    requests = [Request.draw(n, seed=n, slot=slot) for slot, n in enumerate((1, 17, 2, 30, 8, 9), start=1)]
    bench.forward([(request, request.inputs[0].q.shape[0]) for request in requests])
    for request in requests:
        for layer_id, out in expected(bench, request).outputs.items():
            assert relative_error(bench.output(request, layer_id), out) < 5e-3


@pytest.mark.parametrize("record", [SWA_KV, MAIN_KV], ids=lambda record: record.name)
def test_slots_past_two_gigabytes(record):
    """yhfgyyf/vllm-deepseek-v4-sm89#51, vllm-project/vllm#52109: int32 offsets; silently, scores of exactly 0.

    https://github.com/yhfgyyf/vllm-deepseek-v4-sm89/pull/51 https://github.com/vllm-project/vllm/issues/52109
    """
    first = LIMIT // record.bytes - 1
    # Only the pages that are touched take memory.
    large = torch.empty(first + 4, record.bytes, dtype=torch.uint8)
    g, table = torch.Generator().manual_seed(1), torch.ones(8, 32, dtype=torch.complex64)
    values, positions, slots = torch.randn(3, 512, generator=g), torch.arange(3), torch.arange(first, first + 3)
    small = torch.empty(3, record.bytes, dtype=torch.uint8)
    for cache, places in ((large, slots), (small, positions)):
        if record is MAIN_KV:
            store.main_kv_store(values, table, positions, places, cache)
        else:
            store.swa_store(values, torch.ones(512), 1e-20, table, positions, places, cache)
    assert slots[0] * record.bytes < LIMIT < slots[2] * record.bytes
    assert torch.equal(large[slots], small)
    q, sink = torch.randn(1, 2, 512, generator=g).bfloat16(), torch.zeros(2)
    window = records.encode_swa_kv(torch.randn(1, 512, generator=g))
    outputs = []
    for cache, places in ((large, slots), (small, positions)):
        keys = (cache, places[None], None, None)
        if record is MAIN_KV:
            keys = (window, torch.tensor([[0]]), cache, places[None])
        outputs.append(sparse_attention(q, *keys, sink, 512**-0.5))
    assert torch.equal(*outputs)


def test_index_pages_past_two_gigabytes():
    """vllm-project/vllm#52109, the scorer's side: keys above 2^31 bytes score as they would below.

    https://github.com/vllm-project/vllm/issues/52109
    """
    first = (LIMIT // INDEX_PAGE_BYTES - 1) * 64
    large = torch.empty(LIMIT // INDEX_PAGE_BYTES + 2, INDEX_PAGE_BYTES, dtype=torch.uint8)
    small = torch.empty(3, INDEX_PAGE_BYTES, dtype=torch.uint8)
    g, table = torch.Generator().manual_seed(2), torch.ones(256, 32, dtype=torch.complex64)
    keys, positions = torch.randn(192, 128, generator=g), torch.arange(192)
    q, weights = torch.randn(1, 1, 32, 128, generator=g).bfloat16(), torch.randn(1, 1, 32, generator=g).bfloat16()
    scores = []
    for cache, base in ((large, first), (small, 0)):
        store.index_k_store(keys, torch.ones(128), 1e-20, table, positions, base + positions, cache)
        gathered = index_scores.gather_index_k(cache, (base + positions)[None])
        scores.append(index_scores.index_scores(q, weights, gathered))
    assert torch.equal(*scores) and scores[0].any()
    assert INDEX_K.bytes * 64 == INDEX_PAGE_BYTES and not math.isnan(float(scores[0].float().sum()))


@pytest.mark.parametrize("n", [15, 16, 17, 24])
def test_each_row_of_a_chunk_sees_its_own_length(n):
    """ROCm/ATOM#2118: rows of one request were given one length.

    https://github.com/ROCm/ATOM/issues/2118
    """
    bench = Bench(pages=4, candidate_topk_blocks=2, index_topk=4)
    request = Request.draw(n, seed=n, slot=2)
    bench.forward([(request, n)])
    meta = bench.backend.forward_metadata
    for layer_id, chosen in meta.selection.topk.items():
        visible = meta.ratios[bench.plan[layer_id].ratio].visible
        assert (chosen.positions < visible[:, None]).all()
        assert torch.equal((chosen.positions >= 0).sum(-1), visible.clamp(max=4))
