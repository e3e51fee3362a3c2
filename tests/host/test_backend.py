"""The backend over the host's real pool: any schedule of the same tokens gives the reference's values."""

from __future__ import annotations

import pytest
import torch
from harness import Bench, Request, expected, relative_error

from sglang_csa2.selection import SelectionError

BOUNDARY_LENGTHS = [*range(1, 10), *range(127, 132), *range(255, 259), *range(511, 515)]
NOISE = 5e-3  # bf16 storage of q, keys and outputs


@pytest.fixture(scope="module")
def bench():
    return Bench(pages=60)


def run(schedule, *, n, seed=1, slot=3, bench=None):
    bench = bench or Bench()
    request = Request.draw(n, seed, slot)
    for count, mode in schedule:
        bench.forward([(request, count)], mode)
    return bench, request


def assert_expected(bench, request, wanted=None):
    wanted = wanted or expected(bench, request)
    for layer_id, out in wanted.outputs.items():
        assert relative_error(bench.output(request, layer_id), out) < NOISE, f"layer {layer_id}"


def assert_same_bytes(bench, request, other_bench, other):
    mine, theirs = bench.cache_bytes(request), other_bench.cache_bytes(other)
    for name, owned in mine.items():
        assert torch.equal(owned, theirs[name]), name


def test_a_whole_prompt():
    bench, request = run([(300, "EXTEND")], n=300)
    wanted = expected(bench, request)
    assert_expected(bench, request, wanted)
    selection = bench.backend.forward_metadata.selection
    for layer_id, chosen in wanted.chosen.items():
        assert torch.equal(selection.topk[layer_id].positions, chosen), f"layer {layer_id}"


@pytest.mark.parametrize(
    "chunks", [[1] * 9, [7, 1, 1, 255, 36], [127, 129, 44], [299, 1], [1, 299], [255, 2, 43]], ids=str
)
def test_any_chunking_gives_the_same_bytes_and_values(chunks):
    n = sum(chunks)
    whole_bench, whole = run([(n, "EXTEND")], n=n)
    bench, request = run([(count, "EXTEND") for count in chunks], n=n)
    assert_same_bytes(bench, request, whole_bench, whole)
    for layer_id in range(10):
        assert torch.equal(bench.output(request, layer_id), whole_bench.output(whole, layer_id))


@pytest.mark.parametrize("length", BOUNDARY_LENGTHS)
def test_decode_equals_prefill(length):
    """The step that decodes position `length - 1` equals the last row of a prefill of `length` tokens."""
    start = max(0, length - 3)
    whole_bench, whole = run([(length, "EXTEND")], n=length)
    schedule = [(start, "EXTEND")] * bool(start) + [(1, "DECODE")] * (length - start)
    bench, request = run(schedule, n=length)
    assert_same_bytes(bench, request, whole_bench, whole)
    for layer_id in range(10):
        assert torch.equal(bench.output(request, layer_id)[start:], whole_bench.output(whole, layer_id)[start:])


def test_decode_step_by_step_from_nothing():
    bench, request = run([(1, "DECODE")] * 140, n=140)
    assert_expected(bench, request)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_batch_mates_and_order_change_nothing(order):
    lengths = [131, 258, 6, 301]
    bench = Bench(pages=40)
    requests = [Request.draw(n + 4, seed=n, slot=slot) for slot, n in enumerate(lengths, start=1)]
    bench.forward(list(zip(requests, lengths, strict=True)))
    for step in range(4):
        batch = [requests[i] for i in (order if step % 2 else reversed(order))]
        bench.forward([(request, 1) for request in batch], "DECODE")
    for n, request in zip(lengths, requests, strict=True):
        alone_bench, alone = run([(n, "EXTEND")] + [(1, "DECODE")] * 4, n=n + 4, seed=n, slot=5)
        assert_same_bytes(bench, request, alone_bench, alone)
        for layer_id in range(10):
            assert torch.equal(bench.output(request, layer_id), alone_bench.output(alone, layer_id))


def test_mixed_batches():
    """Decode rows beside extends of several lengths, an empty extend among them, as a mixed chunk has them."""
    bench = Bench(pages=40)
    requests = [Request.draw(400, seed=i, slot=i) for i in range(1, 6)]
    bench.forward([(requests[0], 201), (requests[1], 130)])
    bench.forward([(requests[0], 1), (requests[1], 1), (requests[2], 77), (requests[3], 77), (requests[4], 0)], "MIXED")
    bench.forward([(requests[0], 1), (requests[2], 33), (requests[3], 1), (requests[4], 9)], "MIXED")
    for request in requests:
        assert_expected(bench, request)


def test_a_reused_request_slot_keeps_no_pending_half():
    """A request that ends, or is aborted, between the halves of a pair leaves nothing to the slot's next owner."""
    bench = Bench()
    first = Request.draw(131, seed=1, slot=3)
    bench.forward([(first, 131)])
    second = Request.draw(9, seed=2, slot=3)
    bench.forward([(second, 4)])
    bench.forward([(second, 5)])
    assert_expected(bench, second)


def test_a_prefix_hit_reads_the_shared_pages():
    """Two live requests share 256 cached tokens and diverge; each has its own pending half."""
    bench = Bench()
    first = Request.draw(300, seed=1, slot=1)
    bench.forward([(first, 256)])
    second = Request.draw(300, seed=2, slot=2)
    for mine, theirs in zip(second.inputs, first.inputs, strict=True):
        for name in ("q", "kv", "x", "q_lora"):
            getattr(mine, name)[:256] = getattr(theirs, name)[:256]
    bench.req_to_token[2, :256] = bench.req_to_token[1, :256]
    second.length, second.outputs = 256, list(first.outputs)
    bench.forward([(first, 3), (second, 1)])
    bench.forward([(second, 1), (first, 1)], "DECODE")
    assert_expected(bench, first)
    assert_expected(bench, second)


def test_late_layers_run_on_the_tail():
    """Decoder SWA bounded replay: every row is compressed, the last 128 attend with a floored window."""
    bench = Bench(replays_tail=True)
    request = Request.draw(400, seed=1, slot=3)
    bench.forward([(request, 301)])
    exact, replayed = expected(bench, request), expected(bench, request, replayed_from=301 - 128)
    for layer_id in range(5):
        assert relative_error(bench.output(request, layer_id), exact.outputs[layer_id]) < NOISE
    for layer_id in range(5, 10):
        out = bench.output(request, layer_id)
        assert out.shape[0] == 128
        assert relative_error(out, replayed.outputs[layer_id][-128:]) < NOISE, f"layer {layer_id}"
    # The next token's window lies inside the tail, so decode is exact from here on.
    bench.forward([(request, 1)], "DECODE")
    exact = expected(bench, request)
    for layer_id in range(10):
        out = bench.output(request, layer_id)[-1:]
        assert relative_error(out, exact.outputs[layer_id][-1:]) < NOISE, f"layer {layer_id}"


def test_a_short_prompt_is_exact_under_replay():
    bench = Bench(replays_tail=True)
    request = Request.draw(128, seed=1, slot=3)
    bench.forward([(request, 128)])
    assert_expected(bench, request)


def test_whole_tails_mix_with_ordinary_ones():
    """A request that wants prompt log-probabilities keeps every row of the late layers, beside one that does not."""
    bench = Bench(replays_tail=True)
    reader, plain = Request.draw(200, seed=1, slot=1), Request.draw(300, seed=2, slot=2)
    bench.forward([(reader, 200), (plain, 300)], return_logprob=True, extend_logprob_start_lens_cpu=[0, 300])
    whole, replayed = expected(bench, reader), expected(bench, plain, replayed_from=300 - 128)
    for layer_id in range(5, 10):
        assert relative_error(bench.output(reader, layer_id), whole.outputs[layer_id]) < NOISE
        assert relative_error(bench.output(plain, layer_id), replayed.outputs[layer_id][-128:]) < NOISE


def test_a_reader_of_hidden_states_keeps_every_row():
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

    bench = Bench(replays_tail=True)
    request = Request.draw(200, seed=1, slot=1)
    bench.forward([(request, 200)], capture_hidden_mode=CaptureHiddenMode.FULL)
    assert_expected(bench, request)


def test_an_abort_between_chunks_under_replay_leaves_no_trace():
    bench = Bench(replays_tail=True)
    aborted = Request.draw(300, seed=1, slot=1)
    bench.forward([(aborted, 201)])
    bench._free += [int(bench.req_to_token[1, start]) // 256 for start in range(0, 201, 256)]
    request = Request.draw(129, seed=2, slot=1)
    bench.forward([(request, 129)])
    wanted = expected(bench, request, replayed_from=1)
    assert relative_error(bench.output(request, 9), wanted.outputs[9][-128:]) < NOISE


def test_the_pool_shortcut_gives_the_same_choice(monkeypatch):
    """Contexts that fit the pool skip it; forced through it, they choose the same."""
    runs = []
    for skip in (True, False):
        bench = Bench()
        if not skip:
            monkeypatch.setattr(type(bench.plan.config), "candidate_pool_entries", 0)
            monkeypatch.setattr(type(bench.backend.indexer), "_tiles", lambda self, layer, meta, in_pool: meta.groups)
        request = Request.draw(128, seed=1, slot=1)
        bench.forward([(request, 128)])
        selection = bench.backend.forward_metadata.selection
        assert (selection.pools[5] is None) is skip
        runs.append({layer_id: topk.positions for layer_id, topk in selection.topk.items()})
        monkeypatch.undo()
    for layer_id, positions in runs[0].items():
        assert torch.equal(positions, runs[1][layer_id])


@pytest.mark.parametrize(("length", "skipped"), [(127, True), (128, True), (129, False)])
def test_the_pool_shortcut_ends_where_the_pool_does(length, skipped):
    """16 blocks of 8 hold 128 entries: one more and the source publishes blocks."""
    bench, request = run([(length, "EXTEND")], n=length)
    assert (bench.backend.forward_metadata.selection.pools[5] is None) is skipped
    assert_expected(bench, request)


def test_reindex_choices_stay_inside_the_pool():
    bench, _ = run([(400, "EXTEND")], n=400)
    selection, config = bench.backend.forward_metadata.selection, bench.config
    pool = selection.pools[5]
    assert pool is not None and pool.shape == (400, config.candidate_topk_blocks)
    for layer_id in (7, 9):
        chosen = selection.topk[layer_id].positions
        for row in range(400):
            picked = chosen[row][chosen[row] >= 0]
            assert set((picked // config.candidate_block_size).tolist()) <= set(pool[row].tolist())
            assert len(picked) == min(config.index_topk, row + 1)


def test_reuse_and_reindex_layers_write_no_compressed_cache(bench):
    request = Request.draw(64, seed=9, slot=7)
    bench.forward([(request, 64)])
    before = {source: bench.pool.main_cache(source).clone() for source in (2, 5)}
    meta = bench.backend.forward_metadata
    for layer_id in (3, 4, 6, 7, 8, 9):
        layer, data = bench.layers[layer_id], request.inputs[layer_id].rows(slice(0, 64))
        from types import SimpleNamespace

        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        bench.run_layer(layer, data, SimpleNamespace(forward_mode=ForwardMode.EXTEND))
    assert bench.backend.forward_metadata is meta
    for source, cache in before.items():
        assert torch.equal(bench.pool.main_cache(source), cache)


def test_a_selection_does_not_outlive_its_forward(bench):
    request = Request.draw(10, seed=5, slot=6)
    bench.forward([(request, 5)])
    old = bench.backend.forward_metadata.selection
    bench.forward([(request, 1)], "DECODE")
    new = bench.backend.forward_metadata.selection
    assert new is not old and new.topk[2] is not old.topk[2]
    new.topk.clear()
    with pytest.raises(SelectionError, match="layer 3 reads the Top-K of layer 2"):
        new.consume_topk(2, 3)


def test_idle_and_empty_batches_do_nothing(bench):
    from types import SimpleNamespace

    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    idle = SimpleNamespace(forward_mode=ForwardMode.IDLE)
    bench.backend.init_forward_metadata(idle)
    empty = torch.empty(0, 1056)
    bench.backend.forward_low_ratio_sources(
        layer=bench.layers[2], x=empty, q_lora=None, positions=torch.empty(0), forward_batch=idle
    )
    q = torch.empty(0, 4, 512, dtype=torch.bfloat16)
    out = bench.backend.forward(
        q, q, q, bench.layers[2], idle, compress_ratio=2, attn_sink=bench.layers[2].attn_sink, save_kv_cache=False
    )
    assert out.shape == q.shape


def test_unserved_modes_are_named(bench):
    from types import SimpleNamespace

    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from sglang_csa2.backend import BackendError

    with pytest.raises(BackendError, match="not TARGET_VERIFY"):
        bench.backend.init_forward_metadata(SimpleNamespace(forward_mode=ForwardMode.TARGET_VERIFY))
