"""SGLANG_CSA2_CHECK=1: silent on sound schedules, and each invariant fires when it is broken."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from harness import Bench, Request
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_csa2 import envs
from sglang_csa2.ledger import CheckError
from sglang_csa2.metadata import DecodeRatioRows
from sglang_csa2.ops import TorchOps

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


@pytest.mark.parametrize("fault", ["unwritten", "shifted"])
def test_a_prefix_that_is_not_one_sequence(bench, fault):
    start(bench, 20, slot=1)
    second = Request.draw(40, seed=2, slot=2)
    if fault == "shifted":
        bench.req_to_token[2, :8] = bench.req_to_token[1, 1:9]
    else:
        bench.req_to_token[2, :8] = torch.arange(6 * 256, 6 * 256 + 8)
    second.length = 8
    bench.req_to_token[2, 8:256] = bench.req_to_token[1, 8:256]
    with pytest.raises(CheckError, match="starts on a cached prefix of 8 tokens whose position 0"):
        bench.forward([(second, 1)])


def test_a_reuse_layer_that_writes(bench):
    request = start(bench)
    backend, rows = bench.backend, request.inputs[3].rows(slice(0, 21))
    layer = bench.layers[7]
    choose = backend.indexer.choose

    def writes_too(*args):
        choose(*args)
        backend._compress(bench.layers[5], rows.x, backend.forward_metadata)

    backend.indexer.choose = writes_too
    batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND)
    with pytest.raises(CheckError, match="layer 7 is a reindex layer and wrote a compressed cache"):
        backend.forward_low_ratio_sources(
            layer=layer, x=rows.x, q_lora=rows.q_lora, positions=backend.forward_metadata.positions, forward_batch=batch
        )


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
        if bench.backend.ops.attending.index_source == 7:
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
        (lambda positions: positions + 30, "its row does not see"),
        (lambda positions: torch.tensor([[0, 1, 2, 3]]).expand_as(positions), "leaves the candidate pool"),
        (lambda positions: torch.cat([positions[:, 1:], positions[:, :1] * 0 - 1], 1), "holds 3 in row 0, where there"),
    ],
    ids=["order", "twice", "beyond", "outside the pool", "too few"],
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
        (change_meta("positions", lambda p: p - 1), "positions of the forward are not the host's"),
        (change_meta("requests", lambda r: r.roll(4)), "requests of the forward are not the host's"),
        (change_meta("window_first", lambda w: w + 1), "first window positions of the forward are not"),
        (change_meta("swa_slots", lambda s: s.masked_fill(s == s[:, :1], -1)), "does not attend to the whole window"),
        (change_meta("swa_slots", cut), "does not attend to the whole window"),
        (change_meta("swa_slots", lambda s: torch.where(s >= 0, s + 1, s)), "window KV of layer 0: slot"),
        (change_rows(1, visible=lambda v: v - 1), "visible entries at ratio 1 of the forward are not"),
        (change_rows(2, visible=lambda v: v + 1), "visible entries at ratio 2 of the forward are not"),
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


@pytest.mark.parametrize("fault", [-1, 1])
def test_a_replayed_tail_with_another_window(monkeypatch, fault):
    monkeypatch.setenv("SGLANG_CSA2_CHECK", "1")
    bench = Bench(pages=6, replays_tail=True, **SMALL)
    request, build_tail = Request.draw(140, seed=1, slot=3), bench.backend._build_tail

    def faulty(batch):
        tail = build_tail(batch)
        tail.metadata.window_first += fault
        return tail

    bench.backend._build_tail = faulty
    with pytest.raises(CheckError, match="first window positions of the tail"):
        bench.forward([(request, 135)])


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
