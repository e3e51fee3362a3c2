"""What a trace holds, over the host's real pool: the published choices, the pool, and what it left out."""

from __future__ import annotations

import logging

import pytest
import torch
from harness import Bench, Request, expected

from sglang_csa2 import envs
from sglang_csa2.tools.recorded import overlaps, read


@pytest.fixture
def traced(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(envs.TRACE, str(tmp_path))
    with caplog.at_level(logging.WARNING):
        bench = Bench(pages=8)
    assert envs.TRACE in caplog.text
    return bench, tmp_path


def test_no_trace_unless_asked(monkeypatch):
    monkeypatch.delenv(envs.TRACE, raising=False)
    assert Bench(pages=2).backend.indexer.trace is None


def test_a_request_in_chunks_and_decodes(traced):
    """300 rows in three forwards among another request's: every row, as the reference chooses."""
    bench, folder = traced
    mine, other = Request.draw(300, seed=1, slot=3), Request.draw(40, seed=2, slot=5)
    bench.forward([(mine, 200)])
    bench.forward([(other, 40), (mine, 98)])
    for _ in range(2):
        bench.forward([(mine, 1)], "DECODE")
    recording = read(folder, bench.plan)
    assert recording.rows.tolist() == list(range(300))
    assert not list(folder.glob("*.part"))
    wanted = expected(bench, mine)
    for layer_id, choices in recording.layers.items():
        assert torch.equal(choices.positions.long(), wanted.chosen[layer_id])
    # Only the candidate source has a pool, and only its consumers something that it kept from them.
    assert recording.layers[5].blocks is not None and recording.layers[2].blocks is None
    assert recording.layers[2].unrestricted is None and recording.layers[5].unrestricted is None
    free = recording.layers[7].unrestricted
    assert torch.equal(free[:200].long(), _free_choice(bench, wanted, 7)[:200])
    found = {overlap.layer_id: overlap for overlap in overlaps(recording, bench.plan)}
    assert found[5].recall is None and 0 < found[7].recall < 1 and 0 < found[7].with_source < 1


def _free_choice(bench, wanted, layer_id):
    from sglang_csa2 import reference

    visible = reference.visible_entries(torch.arange(300), 1)
    return reference.select_topk(wanted.scores[layer_id], visible, bench.config.index_topk)


def test_tracing_changes_no_output(traced, monkeypatch):
    bench, _ = traced
    monkeypatch.delenv(envs.TRACE)
    plain = Bench(pages=8)
    requests = [Request.draw(200, seed=4, slot=1) for _ in range(2)]
    for one, request in zip((bench, plain), requests, strict=True):
        one.forward([(request, 200)])
    for layer in bench.plan.layers:
        mine, wanted = (
            one.output(request, layer.layer_id) for one, request in zip((bench, plain), requests, strict=True)
        )
        assert torch.equal(mine, wanted)
