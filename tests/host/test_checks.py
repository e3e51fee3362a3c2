"""SGLANG_CSA2_CHECK=1: silent on sound schedules, and each invariant fires when it is broken."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from harness import Bench, Request
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_csa2 import checks, envs, routes
from sglang_csa2.kernels import flash_mla_prefill
from sglang_csa2.ledger import CheckError
from sglang_csa2.metadata import DecodeRatioRows
from sglang_csa2.ops import Entries, Norm, TorchOps

SMALL = {"candidate_topk_blocks": 2, "index_topk": 4}


@pytest.fixture(params=["v41", "v4"])
def bench(monkeypatch, request) -> Bench:
    monkeypatch.setenv("SGLANG_CSA2_CHECK", "1")
    monkeypatch.setenv("SGLANG_CSA2_KV_LAYOUT", request.param)
    return Bench(pages=6, **SMALL)


def start(bench: Bench, n: int = 21, slot: int = 2) -> Request:
    request = Request.draw(40, seed=slot, slot=slot)
    bench.forward([(request, n)])
    return request


def test_off_there_is_nothing(monkeypatch):
    monkeypatch.delenv("SGLANG_CSA2_CHECK", raising=False)
    bench = Bench(pages=4)
    assert type(bench.backend.ops) is TorchOps and "init_forward_metadata" not in vars(bench.backend)
    monkeypatch.setenv("SGLANG_CSA2_CHECK", "perhaps")
    with pytest.raises(ValueError, match="SGLANG_CSA2_CHECK is 'perhaps', a switch"):
        envs.check_enabled()


def test_a_prefill_under_checks_reads_packed_records():
    bench = Bench(pages=4)
    backend = bench.backend
    backend.ops.sparse_prefill = flash_mla_prefill.sparse_prefill
    assert backend.ops.in_place()[routes.PREFILL] == "flash_mla_sparse_fwd"
    checks.install(backend)
    assert backend.ops.in_place()[routes.PREFILL] == backend.routes[routes.PREFILL].route.name == "packed records"
    assert backend.ops.sparse_prefill is None


def test_sound_schedules_pass(bench):
    first, second = start(bench, 21), Request.draw(40, seed=3, slot=4)
    bench.forward([(second, 6), (first, 1)], "MIXED")
    bench.forward([(first, 1), (second, 1)], "DECODE")
    bench.forward([(second, 0), (first, 3)])
    again = Request.draw(40, seed=5, slot=2)
    bench.forward([(again, 7), (second, 1)])
    bench.forward([(again, 1)], "DECODE")


def test_sound_prefix_hits_pass(bench):
    first = Request.draw(262, seed=1, slot=1)
    bench.forward([(first, 257)])
    second = Request.draw(262, seed=2, slot=2)
    bench.req_to_token[2, :256] = bench.req_to_token[1, :256]
    second.length = 256
    bench.forward([(second, 3), (first, 1)])
    bench.forward([(second, 1), (first, 1)], "DECODE")


def test_a_page_put_in_the_place_of_its_copy_passes(bench):
    """Two requests computed one prefix; the host keeps the first's page and the second reads it from then on."""
    first, second = Request.draw(262, seed=1, slot=1), Request.draw(262, seed=1, slot=2)
    bench.forward([(first, 257), (second, 257)])
    bench.req_to_token[2, :256] = bench.req_to_token[1, :256]
    bench.forward([(second, 1), (first, 1)], "DECODE")


@pytest.mark.parametrize("sound", [True, False], ids=["", "to a page that nobody has written"])
def test_window_kv_moved_under_a_cached_page(bench, sound):
    """The host had given up the cached page's window KV: it takes that of a request which has computed the same."""
    first, second = Request.draw(262, seed=1, slot=1), Request.draw(262, seed=1, slot=2)
    bench.forward([(first, 257)])
    bench.forward([(second, 257)])
    kept, incoming = (bench.req_to_token[slot, :256].long() for slot in (1, 2))
    mapping = bench.pool.full_to_swa_index_mapping
    if sound:
        mapping[kept] = mapping[incoming]
    else:
        page = bench._free[0]
        mapping[kept] = mapping[torch.arange(page * 256, (page + 1) * 256)]
    bench.req_to_token[2, :256] = bench.req_to_token[1, :256]
    if sound:
        bench.forward([(second, 1)], "DECODE")
        return
    with pytest.raises(CheckError, match="starts on a cached prefix of 257 tokens whose position 130"):
        bench.forward([(second, 1)], "DECODE")


@pytest.mark.parametrize("rid", ["another", "the same"])
def test_who_comes_after_in_a_request_slot_passes(bench, rid):
    """The page is another request's by then: of another request in the slot, or of this one after a retraction."""
    first, between = Request.draw(262, seed=1, slot=1), Request.draw(262, seed=1, slot=2)
    bench.forward([(first, 256)], rids=["first"])
    if rid == "the same":
        bench.backend.req_to_token_pool.free_rows([1])
    bench._free.append(int(bench.req_to_token[1, 0]) // 256)
    bench.forward([(between, 256)], rids=["between"])
    after = Request.draw(262, seed=1, slot=1)
    after.length = 256
    bench.forward([(after, 3)], rids=["first" if rid == "the same" else "after"])
    bench.forward([(after, 1)], "DECODE", rids=["first" if rid == "the same" else "after"])


REPLAYED = {
    "one request": [[(0, 135)]],
    "several, one without rows": [[(0, 135), (1, 20), (2, 3)], [(0, 2), (1, 0), (2, 1)]],
    "beside decode rows": [[(0, 10)], [(1, 131), (0, 1)]],
    "no rows at all": [[(0, 3)], [(0, 0)]],
}


@pytest.mark.parametrize("batches", REPLAYED.values(), ids=REPLAYED)
@pytest.mark.parametrize("whole", [False, True], ids=["tails", "whole extends"])
def test_replayed_batches_pass(monkeypatch, batches, whole):
    monkeypatch.setenv("SGLANG_CSA2_CHECK", "1")
    bench = Bench(pages=6, replays_tail=True, **SMALL)
    requests = [Request.draw(140, seed=slot, slot=slot) for slot in (1, 2, 3)]
    # Prompt log-probabilities from a position on keep all of a request's rows.
    wants = {"return_logprob": True} if whole else {}
    for batch in batches:
        starts = {"extend_logprob_start_lens_cpu": [0] * len(batch)} if whole else {}
        bench.forward([(requests[n], count) for n, count in batch], **wants, **starts)
    bench.forward([(requests[0], 1)], "DECODE")


def test_a_ratio_two_source_is_compressed_once_under_replay(monkeypatch):
    """The tail starts at the last source: compressed again, it would pair the tail's rows and rewrite the ring."""
    monkeypatch.setenv("SGLANG_CSA2_CHECK", "1")
    config = {
        "kv_source_layer_ids": [2],
        "compress_ratios": [0, 0, *[2] * 8],
        "candidate_source_layer_id": 2,
        "index_source_layer_ids": [2, 7],
    }
    bench = Bench(pages=6, replays_tail=True, **SMALL, **config)
    request = Request.draw(310, seed=1, slot=3)
    bench.forward([(request, 301)])
    bench.forward([(request, 4)])
    bench.forward([(request, 1)], "DECODE")


def test_bounded_replay_passes(monkeypatch):
    monkeypatch.setenv("SGLANG_CSA2_CHECK", "1")
    bench = Bench(pages=6, replays_tail=True, **SMALL)
    request = Request.draw(140, seed=1, slot=3)
    bench.forward([(request, 135)])
    bench.forward([(request, 1)], "DECODE")


@pytest.mark.parametrize("kind", ["window KV", "main KV", "index K", "pending pairs"])
def test_a_slot_not_written_since_its_allocation(bench, kind):
    request = start(bench)
    ledger = bench.backend.ops.ledger
    cache = next(pointer for pointer, name in ledger.names.items() if name.startswith(kind))
    ledger.stamps[cache].zero_()
    with pytest.raises(CheckError, match=f"{kind} of layer . *.*not written since it was allocated"):
        bench.forward([(request, 1)], "DECODE")


def test_a_page_that_another_request_took(bench):
    """The victim's page is handed to another request, which writes it while the victim still reads it."""
    request = start(bench, 20)
    thief = Request.draw(40, seed=7, slot=5)
    bench._free.append(int(bench.req_to_token[2, 0]) // 256)
    bench.forward([(thief, 9)])
    with pytest.raises(CheckError, match="by the request or prefix that reads it"):
        bench.forward([(request, 1)], "DECODE")


@pytest.mark.parametrize(("fault", "position"), [("unwritten", 0), ("shifted", 0), ("spliced", 4)])
def test_a_prefix_that_is_not_one_sequence(bench, fault, position):
    start(bench, 20, slot=1)
    start(bench, 20, slot=3)
    second = Request.draw(40, seed=2, slot=2)
    if fault == "shifted":
        bench.req_to_token[2, :8] = bench.req_to_token[1, 1:9]
    elif fault == "spliced":
        bench.req_to_token[2, :4], bench.req_to_token[2, 4:8] = bench.req_to_token[1, :4], bench.req_to_token[3, 4:8]
    else:
        bench.req_to_token[2, :8] = torch.arange(6 * 256, 6 * 256 + 8)
    second.length = 8
    bench.req_to_token[2, 8:256] = bench.req_to_token[1, 8:256]
    with pytest.raises(CheckError, match=f"starts on a cached prefix of 8 tokens whose position {position}"):
        bench.forward([(second, 1)])


@pytest.mark.parametrize(
    ("layer", "into", "kind", "message"),
    [
        (7, 5, "main KV", "layer 7 is a reindex layer and writes main KV"),
        (7, 5, "index K", "layer 7 is a reindex layer and writes index K"),
        (5, 2, "main KV", "layer 5 writes main KV of layer 2, not main KV of layer 5"),
        (5, 2, "index K", "layer 5 writes index K of layer 2, not index K of layer 5"),
    ],
)
def test_a_layer_that_writes_what_is_not_its_own(bench, layer, into, kind, message):
    request = start(bench)
    backend, rows, other = bench.backend, request.inputs[3].rows(slice(0, 21)), bench.layers[into]
    meta, choose, ops = backend.forward_metadata, backend.indexer.choose, backend.ops
    entries = Entries(rows.kv, meta.swa_out_slots, meta.positions)

    def writes_too(*args):
        choose(*args)
        if kind == "main KV":
            backend._compress(other, rows.x, meta)
        else:
            key = other.indexer.forward_wk(rows.kv)
            norm = Norm(other.indexer.k_norm.weight, 1e-20)
            ops.index_k_store(key, norm, other.freqs_cis, entries, bench.pool.index_cache(into))

    backend.indexer.choose = writes_too
    with pytest.raises(CheckError, match=message):
        backend.forward_low_ratio_sources(
            layer=bench.layers[layer],
            x=rows.x,
            q_lora=rows.q_lora,
            positions=meta.positions,
            forward_batch=SimpleNamespace(forward_mode=ForwardMode.EXTEND),
        )


def test_attention_that_writes(bench):
    request = start(bench)
    backend, attention = bench.backend, bench.backend.ops.inner.sparse_attention
    rows = request.inputs[2].rows(slice(21, 22))

    def writes_too(*args):
        if backend.ops.layer.layer_id == 3:
            backend._compress(bench.layers[2], rows.x, backend.forward_metadata)
        return attention(*args)

    backend.ops.inner.sparse_attention = writes_too
    with pytest.raises(CheckError, match="layer 3 is a reuse layer and writes main KV"):
        bench.forward([(request, 1)], "DECODE")


def test_a_selection_that_outlives_its_forward(bench):
    request = start(bench)
    kept = bench.backend.forward_metadata.selection
    build = bench.backend._build

    def stale(*args, **kwargs):
        meta = build(*args, **kwargs)
        meta.selection = kept
        return meta

    bench.backend._build = stale
    with pytest.raises(CheckError, match="selection of an earlier forward"):
        bench.forward([(request, 1)], "DECODE")


@pytest.mark.parametrize(
    "fault",
    [lambda slots, selection: slots.clone(), lambda slots, selection: selection.topk[2].slots],
    ids=["nobody's", "another source's"],
)
def test_a_selection_that_its_source_did_not_publish(bench, fault):
    request = start(bench)
    attention = bench.backend.ops.sparse_attention

    def foreign(q, swa, swa_slots, main, main_slots, *rest):
        if bench.backend.ops.layer.index_source == 7:
            main_slots = fault(main_slots, bench.backend.forward_metadata.selection)
        return attention(q, swa, swa_slots, main, main_slots, *rest)

    bench.backend.ops.sparse_attention = foreign
    with pytest.raises(CheckError, match="layer 7 attends by a selection that layer 7, its index source, has not"):
        bench.forward([(request, 1)], "DECODE")


@pytest.mark.parametrize(
    ("view", "mine", "other", "message"),
    [
        ("swa_cache", 3, 4, "layer 3 reads window KV of layer 4, not window KV of layer 3"),
        ("main_cache", 3, 5, "layer 3 reads main KV of layer 5, not main KV of layer 2"),
        ("index_cache", 7, 2, "layer 7 reads index K of layer 2, not index K of layer 5"),
    ],
)
def test_another_layers_cache(bench, view, mine, other, message):
    request = start(bench)
    right = getattr(bench.pool, view)
    setattr(bench.pool, view, lambda layer_id: right(other if layer_id == mine else layer_id))
    with pytest.raises(CheckError, match=message):
        bench.forward([(request, 1)], "DECODE")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda positions: positions.flip(-1), "not ascending, unique"),
        (lambda positions: positions[:, [0, 0, 1, 2]], "not ascending, unique"),
        (lambda positions: positions.masked_fill(positions == positions[:, 1:2], -2), "not ascending, unique"),
        (lambda positions: positions + 30, "its row does not see"),
        (lambda positions: torch.tensor([[0, 1, 2, 3]]).expand_as(positions), "leaves the candidate pool"),
        (lambda positions: torch.cat([positions[:, 1:], positions[:, :1] * 0 - 1], 1), "holds 3 in row 0, where there"),
    ],
    ids=["order", "twice", "below -1", "beyond", "outside the pool", "too few"],
)
def test_a_selection_that_breaks_a_rule(bench, fault, message):
    request = start(bench, 30)
    choose = bench.backend.indexer.inner._choose

    def faulty(layer, q, weights, cache, meta, consumed):
        chosen, pool = choose(layer, q, weights, cache, meta, consumed)
        if layer.layer_id == 7:
            if "leaves" in message:
                # The row's pool without its block 0.
                consumed[:, :] = torch.tensor([1, 3])
            positions = fault(chosen.positions)
            slots = meta.tables.compressed_slots(meta.requests[:, None], positions, layer.ratio)
            chosen = replace(chosen, positions=positions, slots=slots)
        return chosen, pool

    bench.backend.indexer.inner._choose = faulty
    with pytest.raises(CheckError, match=message):
        bench.forward([(request, 1)], "DECODE")


def change_rows(ratio: int, **changes):
    """A fault in one ratio's rows: each field through its function."""

    def fault(meta):
        rows = meta.ratios[ratio]
        meta.ratios[ratio] = replace(rows, **{name: change(getattr(rows, name)) for name, change in changes.items()})

    return fault


def change_meta(name: str, change):
    def fault(meta):
        setattr(meta, name, change(getattr(meta, name)))

    return fault


def cut(slots: torch.Tensor) -> torch.Tensor:
    """A window without its oldest slot."""
    return torch.cat([slots[:, 1:], torch.full_like(slots[:, :1], -1)], 1)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (change_meta("positions", lambda p: p - 1), "positions are not the host's"),
        (change_meta("requests", lambda r: r.roll(4)), "requests are not the host's"),
        (change_meta("window_first", lambda w: w + 1), "first window positions are not"),
        (change_meta("swa_slots", lambda s: s.masked_fill(s == s[:, :1], -1)), "does not attend to the whole window"),
        (change_meta("swa_slots", cut), "does not attend to the whole window"),
        (change_meta("swa_slots", lambda s: torch.where(s >= 0, s + 1, s)), "window KV of layer 0: slot"),
        (change_rows(1, visible=lambda v: v - 1), "visible entries at ratio 1 are not"),
        (change_rows(2, visible=lambda v: v + 1), "visible entries at ratio 2 are not"),
        (change_rows(2, partner_rows=lambda p: torch.where(p >= 0, p - 1, p)), "a row that is not its even token"),
        (change_rows(2, pending_reads=lambda r: r + 1), "pending pairs of layer 2: slot"),
        (change_rows(2, partner_rows=lambda p: p.clamp(min=0)), "a row that is not its even token"),
        (change_rows(2, entry_slots=lambda s: s + 1), "index K of layer 2: slot"),
    ],
    ids=str,
)
def test_metadata_that_is_not_the_batchs(bench, fault, message):
    """Two requests, one whose pair's even half waits since an earlier forward."""
    first, second = start(bench, 21), Request.draw(40, seed=3, slot=4)
    build = bench.backend._build

    def faulty(*args, **kwargs):
        meta = build(*args, **kwargs)
        fault(meta)
        return meta

    bench.backend._build = faulty
    with pytest.raises(CheckError, match=message):
        bench.forward([(first, 4), (second, 6)])


def test_a_half_left_in_the_wrong_place(bench):
    request, build = start(bench, 20), bench.backend._build

    def faulty(*args, **kwargs):
        meta = build(*args, **kwargs)
        change_rows(2, pending_writes=lambda rows: rows + 1)(meta)
        return meta

    bench.backend._build = faulty
    bench.forward([(request, 1)], "DECODE")
    bench.backend._build = build
    with pytest.raises(CheckError, match="pending pairs of layer 2: slot"):
        bench.forward([(request, 1)], "DECODE")


@pytest.mark.parametrize("name", ["swa_lengths", "main_lengths"])
def test_bounds_that_hide_listed_slots(bench, name):
    request = start(bench, 30)
    lists = {"swa_lengths": torch.tensor([31]), "main_lengths": torch.tensor([4])}
    bench.backend.ops.lists = lambda *args: SimpleNamespace(**lists)
    bench.forward([(request, 1)], "DECODE")
    lists = {"swa_lengths": torch.tensor([32]), "main_lengths": torch.tensor([4])}
    lists[name] = lists[name] - 1
    with pytest.raises(CheckError, match=r"looks at fewer (window|chosen) slots than are listed"):
        bench.forward([(request, 1)], "DECODE")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (change_meta("window_first", lambda w: w - 1), "first window positions of the replayed tail"),
        (change_meta("window_first", lambda w: w + 1), "first window positions of the replayed tail"),
        (change_meta("positions", lambda p: p - 1), "positions of the replayed tail"),
        (change_meta("requests", lambda r: r + 1), "requests of the replayed tail"),
        (change_rows(1, visible=lambda v: v - 1), "visible entries of the replayed tail at ratio 1"),
    ],
    ids=str,
)
def test_a_replayed_tail_that_is_not_the_forwards(monkeypatch, fault, message):
    monkeypatch.setenv("SGLANG_CSA2_CHECK", "1")
    bench = Bench(pages=6, replays_tail=True, **SMALL)
    request, build_tail = Request.draw(140, seed=1, slot=3), bench.backend._build_tail

    def faulty(batch):
        tail = build_tail(batch)
        fault(tail.metadata)
        return tail

    bench.backend._build_tail = faulty
    with pytest.raises(CheckError, match=message):
        bench.forward([(request, 135)])


def test_a_tail_with_the_forwards_selection(monkeypatch):
    monkeypatch.setenv("SGLANG_CSA2_CHECK", "1")
    bench = Bench(pages=6, replays_tail=True, **SMALL)
    request, build_tail = Request.draw(140, seed=1, slot=3), bench.backend._build_tail

    def faulty(batch):
        tail = build_tail(batch)
        tail.metadata.selection = bench.backend.forward_metadata.selection
        return tail

    bench.backend._build_tail = faulty
    with pytest.raises(CheckError, match="the selection of the whole forward is its tail's"):
        bench.forward([(request, 135)])


def test_slots_that_are_not_the_tables(bench):
    request = start(bench)
    slot = int(bench.req_to_token[2, 21])
    with pytest.raises(CheckError, match="the slots are not the table's: place 0 is"):
        bench.forward([(request, 1)], "DECODE", out_cache_loc=torch.tensor([slot + 1]))


def test_padding_with_a_position(bench):
    request = start(bench)
    bench.forward([(request, 1)], "DECODE")
    meta = bench.backend.forward_metadata
    meta.requests, meta.positions = torch.tensor([2, 0]), torch.tensor([21, 3])
    meta.window_first = torch.tensor([0, 0])
    batch = SimpleNamespace(
        seq_lens_cpu=torch.tensor([22, 4]), forward_mode=ForwardMode.DECODE, req_pool_indices=torch.tensor([2, 0]),
        out_cache_loc=torch.tensor([int(bench.req_to_token[2, 21]), 0]),
    )  # fmt: skip
    with pytest.raises(CheckError, match="positions of padding are not negative"):
        bench.backend.ops.ledger._check_rows(meta, batch)


def test_slots_beyond_a_cache_and_serials_of_nobody(bench):
    start(bench)
    ledger, cache = bench.backend.ops.ledger, bench.pool.main_cache(5)
    slots = bench.req_to_token[2, :1].long()
    serials = ledger.expected[2, :1]
    ledger.read(cache, slots, serials)
    ledger.read(cache, torch.tensor([-1]), torch.tensor([0]))
    for places, wanted in ((slots + (1 << 40), serials), (slots + 100, torch.tensor([0]))):
        with pytest.raises(CheckError, match="main KV of layer 5: slot"):
            ledger.read(cache, places, wanted)


def test_window_layers_read_no_main_kv(bench):
    request = start(bench)
    attention = bench.backend.ops.sparse_attention

    def more(q, swa, swa_slots, main, main_slots, *rest):
        return attention(q, swa, swa_slots, bench.pool.main_cache(2), swa_slots, *rest)

    bench.backend.ops.sparse_attention = more
    with pytest.raises(CheckError, match="layer 0 attends to its window alone and was given main KV"):
        bench.forward([(request, 1)], "DECODE")


def test_slots_that_are_not_their_entries(bench):
    request = start(bench, 30)
    choose = bench.backend.indexer.inner._choose

    def faulty(layer, *rest):
        chosen, pool = choose(layer, *rest)
        return replace(chosen, slots=chosen.slots.roll(1, -1)), pool

    bench.backend.indexer.inner._choose = faulty
    with pytest.raises(CheckError, match="the selection of layer 2 has slots that are not its entries'"):
        bench.forward([(request, 1)], "DECODE")


def test_pairs_of_a_decode_in_fixed_shapes(bench):
    """On a GPU the rows say where halves wait by themselves; here they are asked without a GPU."""
    request, other = start(bench, 20), start(bench, 21, slot=4)
    ops, ring = bench.backend.ops, bench.pool.pending_ring
    bench.forward([(request, 1), (other, 1)], "DECODE")
    rows = DecodeRatioRows(
        visible=torch.tensor([10, 11, 0]), positions=torch.tensor([20, 21, -1]), requests=torch.tensor([2, 4, -1]),
        out_slots=torch.tensor([600, 900, -1]), ring=ring, entry_slots=torch.zeros(3), entry_positions=torch.zeros(3),
    )  # fmt: skip
    meta = bench.backend.forward_metadata
    meta.requests, meta.positions = torch.tensor([2, 4, 0]), torch.tensor([20, 21, -1])
    place, serials = ops._waiting(rows)
    assert place.tolist() == [-1, 4 * ring + 20 % ring, -1]
    assert serials[1] == ops.ledger.expected[4, 20] > 0
    place, serials = ops._left_waiting(rows)
    assert place.tolist() == [2 * ring + 20 % ring, -1, -1]
    assert serials[0] == ops.ledger.expected[2, 20] > 0


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda pool: pool.fill_(-1), "does not end with its row's newest block"),
        (lambda pool: pool[:, :1], "does not end with its row's newest block"),
        (lambda pool: torch.cat([pool[:, 1:], pool[:, :1] * 0 - 1], 1), "holds 1 in row 0, where there are 2"),
        (lambda pool: pool.flip(-1), "not ascending, unique"),
        (lambda pool: None, "was not published, and a row sees more entries"),
    ],
    ids=["empty", "without the newest", "too few", "order", "absent"],
)
def test_a_pool_that_breaks_a_rule(bench, fault, message):
    request = start(bench, 30)
    choose = bench.backend.indexer.inner._choose

    def faulty(layer, q, weights, cache, meta, consumed):
        chosen, pool = choose(layer, q, weights, cache, meta, consumed)
        return chosen, pool if pool is None else fault(pool)

    bench.backend.indexer.inner._choose = faulty
    with pytest.raises(CheckError, match=message):
        bench.forward([(request, 1)], "DECODE")


def test_a_graph_is_refused(bench):
    with pytest.raises(CheckError, match="--disable-cuda-graph"):
        bench.backend.init_forward_metadata_in_graph(None)
