"""SGLANG_CSA2_CHECK=1: silent on sound schedules, and each invariant fires when it is broken."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from harness import Bench, Request
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_csa2 import envs
from sglang_csa2.checks import CheckError
from sglang_csa2.ops import TorchOps

SMALL = {"candidate_topk_blocks": 2, "index_topk": 4}


@pytest.fixture
def bench(monkeypatch) -> Bench:
    monkeypatch.setenv("SGLANG_CSA2_CHECK", "1")
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


def test_a_selection_that_was_not_published(bench):
    request = start(bench)
    attention = bench.backend.ops.sparse_attention

    def foreign(q, swa, swa_slots, main, main_slots, *rest):
        return attention(q, swa, swa_slots, main, None if main_slots is None else main_slots.clone(), *rest)

    bench.backend.ops.sparse_attention = foreign
    with pytest.raises(CheckError, match="not published in this forward"):
        bench.forward([(request, 1)], "DECODE")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda positions: positions.flip(-1), "not ascending, unique"),
        (lambda positions: positions[:, [0, 0, 1, 2]], "not ascending, unique"),
        (lambda positions: positions + 30, "its row does not see"),
        (lambda positions: torch.tensor([[0, 1, 2, 3]]).expand_as(positions), "leaves the candidate pool"),
    ],
    ids=["order", "twice", "beyond", "outside the pool"],
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


def test_a_pool_without_the_newest_block(bench):
    request = start(bench, 30)
    choose = bench.backend.indexer.inner._choose

    def faulty(layer, q, weights, cache, meta, consumed):
        chosen, pool = choose(layer, q, weights, cache, meta, consumed)
        return chosen, pool if pool is None else pool.fill_(-1)

    bench.backend.indexer.inner._choose = faulty
    with pytest.raises(CheckError, match="newest block"):
        bench.forward([(request, 1)], "DECODE")


def test_a_graph_is_refused(bench):
    with pytest.raises(CheckError, match="--disable-cuda-graph"):
        bench.backend.init_forward_metadata_in_graph(None)
