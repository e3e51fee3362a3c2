"""[host] What csa2 adds to the host's Prometheus endpoint under `--enable-metrics`; without it nothing of this runs.

| metric                       | type    | meaning                                                            |
|------------------------------|---------|--------------------------------------------------------------------|
| `csa2:route{op, route}`      | gauge   | 1 for the route that serves each operation of routes.py            |
| `csa2:kv_bytes{kind, state}` | gauge   | bytes of `global` and `swa` KV on one GPU, `allocated` and `used`  |
|                              |         | (held by requests or the prefix cache)                             |
| `csa2:rows`                  | counter | query rows, without a graph's padding                              |
| `csa2:rows_beyond_pool`      | counter | those whose context exceeds the candidate pool: their share of     |
|                              |         | `csa2:rows` is the pool's coverage                                 |
| `csa2:refused`               | counter | forwards that csa2 refused; stays 0. The host ends its scheduler   |
|                              |         | on one, so that a scrape rarely sees it move                       |
| `csa2:fallen_back`           | counter | forwards in which an operation's route is not the one chosen at    |
|                              |         | start, or another function stands where the backend, its ops or    |
|                              |         | its indexer call one of theirs; stays 0                            |

Counters end in `_total` on the endpoint. The numbers come from the host's own, once per forward; nothing is asked of a
device. One rank of a server reports. Graph replays run what stood in place when they were captured, and what kernels
call in turn is not looked at.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_observability, get_parallel

from sglang_csa2 import routes
from sglang_csa2.layout import global_bytes_per_token, swa_bytes_per_slot

# What a forward calls of the operations.
_OPERATIONS = (
    "swa_store", "main_kv_store", "index_k_store", "lists", "sparse_attention", "sparse_prefill", "gather_swa_kv",
    "gather_main_kv",
)  # fmt: skip
# Where a forward may be refused; what these call is not wrapped again, so that a forward counts once.
_ENTRIES = (
    "init_forward_metadata_in_graph",
    "enter_late_layer_tail",
    "get_swa_out_cache_loc",
    "forward_low_ratio_sources",
    "forward",
)
_POOL_ENTRIES = ("set_swa_key_buffer_radix_fused_norm_rope",)


def enabled() -> bool:
    """Whether this process reports: one rank of those that count the same rows.

    That is the host's rule for the rank that logs (`SchedulerMetricsCollector.init_new`). Its
    `--enable-metrics-for-all-schedulers` tells ranks apart by a label, which here would tell the same thing again.
    """
    parallel = get_parallel()
    return bool(get_observability().enable_metrics) and parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0


def install(backend: Any, model_runner: Any, registry: Any = None) -> Report:
    """Count a backend's forwards. In the scheduler's process, where the host has set up the multiprocess folder."""
    report = Report(backend, model_runner, registry)
    backend.init_forward_metadata = report.around(backend.init_forward_metadata)
    backend.init_forward_metadata_out_graph = report.around(backend.init_forward_metadata_out_graph)
    pool = backend.token_to_kv_pool
    for of, names in ((backend, _ENTRIES), (pool, _POOL_ENTRIES)):
        for name in names:
            setattr(of, name, report.watched(getattr(of, name)))
    return report


class Report:
    """registry: where the metrics go, the library's own by default.

    chosen: the route of each operation as chosen at start. standing: what stood in its place then.
    """

    def __init__(self, backend: Any, model_runner: Any, registry: Any = None):
        # prometheus_client reads the multiprocess folder when it is first imported.
        from prometheus_client import REGISTRY, Counter, Gauge

        where = {"registry": registry or REGISTRY}
        gauge = where | {"multiprocess_mode": "mostrecent"}
        self.backend, self.runner = backend, model_runner
        self.chosen = {operation: choice.route.name for operation, choice in backend.routes.items()}
        self.standing = _standing(backend)
        route = Gauge("csa2:route", "Route that serves an operation.", ["op", "route"], **gauge)
        for operation, name in _serving(backend).items():
            route.labels(operation, name).set(1)
        self.bytes = Gauge("csa2:kv_bytes", "Bytes of KV.", ["kind", "state"], **gauge)
        self.rows = Counter("csa2:rows", "Query rows.", **where)
        self.beyond = Counter("csa2:rows_beyond_pool", "Query rows whose context exceeds the candidate pool.", **where)
        self.refused = Counter("csa2:refused", "Forwards that csa2 refused; 0 on a sound server.", **where)
        self.fallen_back = Counter("csa2:fallen_back", "Forwards on another route than at start; 0.", **where)
        for counter in (self.rows, self.beyond, self.refused, self.fallen_back):
            counter.inc(0)
        allocated = backend.token_to_kv_pool.layer_bytes()
        self.bytes.labels("global", "allocated").set(allocated["main_kv"] + allocated["index_k"])
        self.bytes.labels("swa", "allocated").set(allocated["swa_kv"])

    def around(self, build: Any) -> Any:
        build = self.watched(build)

        def counted(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            result = build(forward_batch, *args, **kwargs)
            if not (forward_batch.forward_mode.is_idle() or kwargs.get("in_capture")):
                self.forward(forward_batch)
            return result

        return counted

    def watched(self, entry: Any) -> Any:
        def asked(*args: Any, **kwargs: Any) -> Any:
            try:
                return entry(*args, **kwargs)
            except Exception:
                self.refused.inc()
                raise

        return asked

    def forward(self, batch: Any) -> None:
        counts, lengths = real_rows(batch)
        self.rows.inc(sum(counts))
        self.beyond.inc(rows_beyond_pool(self.backend.plan, counts, lengths))
        # A stranger in an operation's place need not be able to name itself.
        self.fallen_back.inc(_standing(self.backend) != self.standing or _serving(self.backend) != self.chosen)
        # Built before the backend or after it, by the kind of pool.
        allocator = getattr(self.runner, "token_to_kv_pool_allocator", None)
        if allocator is not None:
            plan, layout = self.backend.plan, self.backend.token_to_kv_pool.layout
            held = allocator.size_full - allocator.full_available_size()
            self.bytes.labels("global", "used").set(held * global_bytes_per_token(plan, layout))
            held = allocator.size_swa - allocator.swa_available_size()
            self.bytes.labels("swa", "used").set(held * swa_bytes_per_slot(plan, layout))


def _serving(backend: Any) -> dict[str, str]:
    """The route of every operation, in the table's order, by the functions that a forward would call now."""
    stores = backend.token_to_kv_pool._ops.in_place()[routes.STORES]
    found = backend.ops.in_place() | _inner(backend.indexer).in_place()
    if found[routes.STORES] != stores:
        found[routes.STORES] += f", window KV {stores}"
    return {operation: found[operation] for operation in routes.OPERATIONS}


def _standing(backend: Any) -> list[Any]:
    """The functions themselves: methods are equal where their objects are the same."""
    ops, indexer = backend.ops, backend.indexer
    places = [(of, name) for of in (ops, _inner(ops)) for name in _OPERATIONS]
    places += [(of, name) for of in (indexer, _inner(indexer)) for name in ("choose", "_choose", "_kernels")]
    places.append((backend.token_to_kv_pool._ops, "swa_store"))
    return [getattr(of, name, None) for of, name in places]


def _inner(checked: Any) -> Any:
    """What checks are put around, or the thing itself."""
    return getattr(checked, "inner", checked)


def real_rows(batch: Any) -> tuple[list[int], list[int]]:
    """Rows and context of each request of a batch, without the requests that only fill a graph.

    A graph's replay comes as a view that is as wide as the capture; its last `num_padding` requests are none
    (`build_replay_fb_view` in the host's decode_cuda_graph_runner.py). Other batches have no such field.
    """
    lengths = batch.seq_lens_cpu.tolist()
    lengths = lengths[: len(lengths) - getattr(batch, "num_padding", 0)]
    return [1] * len(lengths) if batch.forward_mode.is_decode() else list(batch.extend_seq_lens_cpu), lengths


def rows_beyond_pool(plan: Any, counts: list[int], lengths: list[int]) -> int:
    """Rows that see more entries than a candidate pool holds; 0 for a model without one."""
    source = plan.config.candidate_source_layer_id
    if source is None:
        return 0
    ratio = plan[source].ratio
    # The longest context whose entries all fit.
    fits = (plan.config.candidate_pool_entries + 1) * ratio - 1
    return sum(max(0, length - max(fits, length - count)) for count, length in zip(counts, lengths, strict=True))
