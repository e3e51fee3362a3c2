"""Prefill through a workspace, on the CPU: the library's kernel is played by the reference, with poisoned keys."""

from __future__ import annotations

import pytest
import torch
from harness import Bench, Request, expected, relative_error

from sglang_csa2 import envs, reference, workspace
from sglang_csa2.ops import TorchOps

NOISE = 5e-3


class WorkspaceOps(TorchOps):
    """Counts gathers; every listed index must be a key that was gathered."""

    index_multiple = 128

    def __init__(self):
        self.main_gathers, self.calls = 0, 0

    def gather_main_kv(self, cache, slots, out):
        self.main_gathers += 1
        super().gather_main_kv(cache, slots, out)

    def sparse_prefill(self, q, kv, indices, lengths, attn_sink, scale):
        self.calls += 1
        assert indices.shape[1] % 128 == 0 and indices.max() < len(kv)
        if lengths is not None:
            past = torch.arange(indices.shape[1]) >= lengths[:, None]
            assert (indices[past] < 0).all(), "a listed key lies past the row's length"
        return reference.sparse_attention(q, kv, indices.long(), attn_sink, scale).bfloat16()


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(workspace, "LEAST_ROWS", 2)
    real = torch.empty

    def poisoned(*size, **options):
        out = real(*size, **options)
        return out.fill_(torch.nan) if out.dtype is torch.bfloat16 else out

    monkeypatch.setattr(torch, "empty", poisoned)


def make_bench(**options) -> Bench:
    bench = Bench(**options)
    bench.backend.ops = WorkspaceOps()
    return bench


def assert_expected(bench, request):
    for layer_id, out in expected(bench, request).outputs.items():
        assert relative_error(bench.output(request, layer_id), out) < NOISE, f"layer {layer_id}"


@pytest.mark.parametrize("counts", [[300], [7, 2, 255, 36], [129, 128, 43]], ids=str)
def test_schedules(counts):
    bench = make_bench()
    request = Request.draw(sum(counts), seed=1, slot=3)
    for count in counts:
        bench.forward([(request, count)])
    assert bench.backend.ops.calls == len(counts) * len(bench.layers)
    assert_expected(bench, request)


def test_mixed_batch():
    """Prefixes, a decode row, an empty extend and equal counts in one forward."""
    bench = make_bench(pages=40)
    requests = [Request.draw(400, seed=i, slot=i) for i in range(1, 6)]
    bench.forward([(requests[0], 201), (requests[1], 130)])
    bench.forward([(requests[0], 1), (requests[1], 1), (requests[2], 77), (requests[3], 77), (requests[4], 0)], "MIXED")
    bench.forward([(requests[0], 150), (requests[2], 33), (requests[4], 9)], "MIXED")
    for request in requests:
        if request.length:
            assert_expected(bench, request)


def test_tail_has_a_workspace_of_its_own():
    bench = make_bench(replays_tail=True)
    request = Request.draw(400, seed=1, slot=3)
    bench.forward([(request, 301)])
    replayed = expected(bench, request, replayed_from=301 - 128)
    for layer_id in range(5, 10):
        assert relative_error(bench.output(request, layer_id), replayed.outputs[layer_id][-128:]) < NOISE


def test_reuse_changes_no_bit_and_gathers_once_per_source():
    outputs, gathers = [], []
    for reuse in (True, False):
        bench = make_bench()
        bench.backend.prefill_kv_reuse = reuse
        request = Request.draw(300, seed=1, slot=3)
        bench.forward([(request, 260)])
        bench.forward([(request, 40)])
        outputs.append([bench.output(request, layer.layer_id) for layer in bench.layers])
        gathers.append(bench.backend.ops.main_gathers)
    assert all(torch.equal(kept, anew) for kept, anew in zip(*outputs, strict=True))
    readers = sum(layer.ratio > 0 for layer in bench.plan.layers)
    assert gathers == [2 * len(bench.config.kv_source_layer_ids), 2 * readers]


@pytest.mark.parametrize(("least", "most"), [(10_000, 2 << 30), (2, 100 << 10)], ids=["few rows", "long context"])
def test_other_forwards_read_packed_records(monkeypatch, least, most):
    monkeypatch.setattr(workspace, "LEAST_ROWS", least)
    monkeypatch.setattr(workspace, "MOST_BYTES", most)
    bench = make_bench()
    request = Request.draw(300, seed=1, slot=3)
    bench.forward([(request, 300)])
    assert bench.backend.workspace is None and bench.backend.ops.calls == 0
    assert_expected(bench, request)


@pytest.mark.parametrize(("value", "wanted"), [("1", True), ("off", False), ("", False), ("TRUE", True)])
def test_the_flag(value, wanted):
    assert envs.prefill_kv_reuse({envs.PREFILL_KV_REUSE: value}) is wanted
    assert envs.prefill_kv_reuse({}) is True


def test_the_flag_refuses_what_is_no_switch():
    with pytest.raises(envs.EnvError, match="PREFILL_KV_REUSE is 'maybe'"):
        envs.prefill_kv_reuse({envs.PREFILL_KV_REUSE: "maybe"})
