"""The counts behind the metrics; tests/conformance/test_scheduler.py reads them from a server."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from harness import Bench, Request, tiny_config
from prometheus_client import CollectorRegistry

from sglang_csa2 import checks, metrics, routes
from sglang_csa2.backend import BackendError
from sglang_csa2.indexer import TorchIndexer
from sglang_csa2.layer_plan import LayerPlan
from sglang_csa2.layout import global_bytes_per_token, swa_bytes_per_slot
from sglang_csa2.metrics import rows_beyond_pool
from sglang_csa2.ops import TorchOps


class Counted:
    """A backend with metrics on a registry of their own."""

    def __init__(self, *, checked: bool = False):
        self.bench = Bench(pages=4)
        self.backend, self.registry = self.bench.backend, CollectorRegistry()
        if checked:
            checks.install(self.backend)
        metrics.install(self.backend, SimpleNamespace(), self.registry)
        self.request = Request.draw(8, seed=1, slot=1)

    def forward(self, count: int = 1, **extra) -> None:
        self.bench.forward([(self.request, count)], **extra)

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels)

    @property
    def counts(self) -> tuple[float, ...]:
        """Rows, refused, fallen back."""
        return tuple(self.value(f"csa2:{name}_total") for name in ("rows", "refused", "fallen_back"))


@pytest.mark.parametrize("source", [5, 2, None])
def test_rows_beyond_the_pool_are_those_that_see_more(source):
    if source == 2:
        config = tiny_config(kv_source_layer_ids=[2], compress_ratios=[0, 0, *[2] * 8], candidate_source_layer_id=2)
    else:
        config = tiny_config(candidate_source_layer_id=-1 if source is None else source)
    plan = LayerPlan.from_config(config)
    counts, lengths = [1, 40, 300, 3, 129, 0], [129, 140, 300, 258, 129, 500]
    ratio, entries = (plan[source].ratio, config.candidate_pool_entries) if source else (1, 1 << 60)
    rows = [p for c, n in zip(counts, lengths, strict=True) for p in range(n - c, n)]
    assert rows_beyond_pool(plan, counts, lengths) == sum((p + 1) // ratio > entries for p in rows)


def test_without_the_flag_there_is_nothing():
    bench = Bench(pages=4)
    assert "init_forward_metadata" not in vars(bench.backend)
    bench.forward([(Request.draw(3, seed=1, slot=1), 3)])


@pytest.mark.parametrize("checked", [False, True])
def test_every_operation_is_on_the_endpoint_and_nothing_moves_on_a_sound_backend(checked):
    counted = Counted(checked=checked)
    counted.forward(3)
    counted.forward(1)
    (family,) = (metric for metric in counted.registry.collect() if metric.name == "csa2:route")
    chosen = {operation: choice.route.name for operation, choice in counted.backend.routes.items()}
    assert {s.labels["op"]: s.labels["route"] for s in family.samples} == chosen
    assert set(chosen) == set(routes.OPERATIONS) and all(s.value == 1 for s in family.samples)
    assert counted.counts == (4, 0, 0)


class Slower(TorchOps):
    """Another object in a route's place."""


def other_ops(counted) -> None:
    counted.backend.ops = Slower()


def other_store_of_window_kv(counted) -> None:
    counted.bench.pool._ops = Slower()


def other_indexer(counted) -> None:
    counted.backend.indexer = TorchIndexer(counted.bench.plan)


def nameless_indexer(counted) -> None:
    counted.backend.indexer = SimpleNamespace(choose=counted.backend.indexer.choose)


def other_function(counted) -> None:
    inner = counted.backend.ops.sparse_attention
    counted.backend.ops.sparse_attention = lambda *arguments: inner(*arguments)


def other_gather(counted) -> None:
    counted.backend.ops.gather_main_kv = lambda *arguments: None


def other_kernel(counted) -> None:
    """The same objects, with a kernel of another route behind them."""
    counted.monkeypatch.setattr("sglang_csa2.indexer.select_topk", other_topk)


def other_topk(*arguments):
    from sglang_csa2.kernels.topk import select_topk

    return select_topk(*arguments)


@pytest.mark.parametrize(
    "swap",
    [
        other_ops,
        other_store_of_window_kv,
        other_indexer,
        nameless_indexer,
        other_function,
        other_gather,
        other_kernel,
    ],
)
def test_a_forward_on_another_route_than_at_start_is_counted(swap, monkeypatch):
    counted = Counted()
    counted.monkeypatch = monkeypatch
    counted.forward(2)
    kept = counted.backend.ops, counted.bench.pool._ops, counted.backend.indexer
    swap(counted)
    counted.forward(1)
    counted.forward(1)
    assert counted.counts == (4, 0, 2)
    # And no more once the route is the one of the start again.
    monkeypatch.undo()
    counted.backend.ops, counted.bench.pool._ops, counted.backend.indexer = kept
    for name in ("sparse_attention", "gather_main_kv"):
        vars(counted.backend.ops).pop(name, None)
    counted.forward(1)
    assert counted.counts == (5, 0, 2)


def test_a_kernel_behind_the_checks_is_counted():
    counted = Counted(checked=True)
    inner = counted.backend.ops.inner
    attention = inner.sparse_attention
    counted.forward(1)
    inner.sparse_attention = lambda *arguments: attention(*arguments)
    counted.forward(1)
    assert counted.counts == (2, 0, 1)


def test_a_gpu_indexers_kernels_are_counted():
    """One of the indexer's functions for another, as its `_kernels` names them."""
    counted = Counted()
    counted.backend.indexer._kernels = ("scan", "best blocks")
    report = metrics.Report(counted.backend, SimpleNamespace(), registry := CollectorRegistry())
    batch = SimpleNamespace(seq_lens_cpu=torch.tensor([3]), forward_mode=MagicMock())
    report.forward(batch)
    counted.backend.indexer._kernels = ("scan", "other best blocks")
    report.forward(batch)
    assert registry.get_sample_value("csa2:fallen_back_total") == 1


def test_used_bytes_are_those_held():
    counted = Counted()
    sizes = {"size_full": 1024, "size_swa": 512}
    allocator = SimpleNamespace(full_available_size=lambda: 256, swa_available_size=lambda: 500, **sizes)
    report = metrics.Report(
        counted.backend, SimpleNamespace(token_to_kv_pool_allocator=allocator), registry := CollectorRegistry()
    )
    report.forward(SimpleNamespace(seq_lens_cpu=torch.tensor([3]), forward_mode=MagicMock()))
    plan = counted.bench.plan
    for kind, bytes_held in (("global", 768 * global_bytes_per_token(plan)), ("swa", 12 * swa_bytes_per_slot(plan))):
        assert registry.get_sample_value("csa2:kv_bytes", {"kind": kind, "state": "used"}) == bytes_held > 0


@pytest.mark.parametrize(
    "name", ["init_forward_metadata_in_graph", "enter_late_layer_tail", "get_swa_out_cache_loc", "forward"]
)
def test_every_entry_of_a_forward_may_refuse(name):
    counted = Counted()
    counted.backend.forward_metadata = None
    with pytest.raises(Exception, match=r".") as error:
        # None of them has what it needs.
        if name == "forward":
            counted.backend.forward(*[MagicMock()] * 7, save_kv_cache=True)
        else:
            getattr(counted.backend, name)(MagicMock())
    assert not isinstance(error.value, AssertionError) and counted.counts == (0, 1, 0)


def test_a_refused_store_of_window_kv_is_counted():
    counted = Counted()
    counted.bench.pool._ops = MagicMock(swa_store=MagicMock(side_effect=RuntimeError))
    with pytest.raises(RuntimeError):
        counted.forward(1)
    assert counted.value("csa2:refused_total") == 1


def test_a_start_on_another_route_than_the_tables_is_counted():
    counted = Counted()
    counted.backend.routes = counted.backend.routes | {
        routes.SCAN: SimpleNamespace(route=SimpleNamespace(name="triton"))
    }
    again = metrics.Report(counted.backend, SimpleNamespace(), registry := CollectorRegistry())
    again.forward(SimpleNamespace(seq_lens_cpu=torch.tensor([3]), forward_mode=MagicMock()))
    assert registry.get_sample_value("csa2:fallen_back_total") == 1
    assert registry.get_sample_value("csa2:route", {"op": routes.SCAN, "route": "torch"}) == 1


def test_a_refused_forward_is_counted_once():
    counted = Counted()
    with pytest.raises(BackendError):
        counted.forward(1, mode="TARGET_VERIFY")
    assert counted.counts == (0, 1, 0)
    # While metadata is built, and in a layer of a forward that has begun.
    counted.request.length = 0
    counted.backend._build = MagicMock(side_effect=RuntimeError)
    with pytest.raises(RuntimeError):
        counted.forward(1)
    assert counted.counts == (0, 2, 0)
    del counted.backend._build
    counted.request.length = 0
    counted.backend.indexer._choose = MagicMock(side_effect=RuntimeError)
    with pytest.raises(RuntimeError):
        counted.forward(2)
    assert counted.counts == (2, 3, 1)


def test_a_graphs_padding_is_not_counted():
    """The view that the host builds for a replay, of three requests in a graph of eight."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import build_replay_fb_view

    def view(real: int) -> SimpleNamespace:
        buffers = MagicMock(seq_lens_cpu=torch.tensor([200, 5, 140, 1, 1, 1, 1, 1])[:8])
        batch = MagicMock(batch_size=real, seq_lens_sum=345, forward_mode=ForwardMode.DECODE)
        return build_replay_fb_view(
            forward_batch=batch, buffers=buffers, bs=8, raw_bs=real, num_tokens=8, global_num_tokens_cpu=None,
            seq_len_fill_value=1, capture_forward_mode=ForwardMode.DECODE, is_encoder_decoder=False,
        )  # fmt: skip

    assert metrics.real_rows(view(3)) == ([1, 1, 1], [200, 5, 140])
    assert metrics.real_rows(view(8)) == ([1] * 8, [200, 5, 140, 1, 1, 1, 1, 1])
    assert metrics.real_rows(view(0)) == ([], [])
    counted = Counted()
    counted.backend.init_forward_metadata_out_graph(view(3))
    counted.backend.init_forward_metadata_out_graph(view(8), in_capture=True)
    assert counted.counts == (3, 0, 0)
    # The pool holds 128 entries of ratio 1.
    assert counted.value("csa2:rows_beyond_pool_total") == 2


@pytest.mark.parametrize(
    ("on", "tp_rank", "cp_rank", "reports"),
    [(True, 0, 0, True), (True, 1, 0, False), (True, 3, 0, False), (True, 0, 1, False), (False, 0, 0, False)],
)
@pytest.mark.parametrize("all_schedulers", [False, True])
def test_one_rank_reports(monkeypatch, on, tp_rank, cp_rank, reports, all_schedulers):
    observability = SimpleNamespace(enable_metrics=on, enable_metrics_for_all_schedulers=all_schedulers)
    monkeypatch.setattr(metrics, "get_observability", lambda: observability)
    parallel = SimpleNamespace(attn_tp_rank=tp_rank, attn_cp_rank=cp_rank, tp_rank=tp_rank)
    monkeypatch.setattr(metrics, "get_parallel", lambda: parallel)
    assert metrics.enabled() is reports
    installed = []
    monkeypatch.setattr(metrics, "install", lambda backend, runner: installed.append(backend))
    bench = Bench(pages=4)
    assert installed == [bench.backend] * reports
