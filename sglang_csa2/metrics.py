"""[host] What csa2 adds to the host's Prometheus endpoint under `--enable-metrics`; without it nothing of this runs.

| metric                       | type    | meaning                                                            |
|------------------------------|---------|--------------------------------------------------------------------|
| `csa2:route{op, route}`      | gauge   | 1 for the route that serves each operation                         |
| `csa2:kv_bytes{kind, state}` | gauge   | bytes of `global` and `swa` KV, `allocated` and `used` (held by    |
|                              |         | requests or the prefix cache)                                      |
| `csa2:rows`                  | counter | query rows                                                         |
| `csa2:rows_beyond_pool`      | counter | those whose context exceeds the candidate pool: their share of     |
|                              |         | `csa2:rows` is the pool's coverage                                 |
| `csa2:refused`               | counter | forwards that csa2 refused; stays 0                                |
| `csa2:fallen_back`           | counter | forwards on another route than at start; stays 0                   |

Counters end in `_total` on the endpoint. The numbers come from the host's own, once per forward; nothing is asked of a
device.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_observability

from sglang_csa2 import routes
from sglang_csa2.layout import global_bytes_per_token, swa_bytes_per_slot

# The operations of the endpoint, and those of the table of routes that serve them.
OPERATIONS = {
    "swa_store": routes.STORES,
    "main_kv_store": routes.STORES,
    "index_k_store": routes.STORES,
    "index": routes.SCAN,
    "sparse_attention": routes.DECODE,
}


def enabled() -> bool:
    return bool(get_observability().enable_metrics)


def install(backend: Any, model_runner: Any) -> None:
    """Count a backend's forwards. In the scheduler's process, where the host has set up the multiprocess folder."""
    report = Report(backend, model_runner)
    backend.init_forward_metadata = report.around(backend.init_forward_metadata)
    backend.init_forward_metadata_out_graph = report.around(backend.init_forward_metadata_out_graph)


class Report:
    def __init__(self, backend: Any, model_runner: Any):
        # prometheus_client reads the multiprocess folder when it is first imported.
        from prometheus_client import Counter, Gauge

        self.backend, self.runner, self.route = backend, model_runner, backend.ops.name
        route = Gauge("csa2:route", "Route that serves an operation.", ["op", "route"], multiprocess_mode="mostrecent")
        for operation, row in OPERATIONS.items():
            route.labels(operation, backend.routes[row].route.name).set(1)
        self.bytes = Gauge("csa2:kv_bytes", "Bytes of KV.", ["kind", "state"], multiprocess_mode="mostrecent")
        self.rows = Counter("csa2:rows", "Query rows.")
        self.beyond = Counter("csa2:rows_beyond_pool", "Query rows whose context exceeds the candidate pool.")
        self.refused = Counter("csa2:refused", "Forwards that csa2 refused; 0 on a sound server.")
        self.fallen_back = Counter("csa2:fallen_back", "Forwards on another route than at start; 0, there is none.")
        for counter in (self.rows, self.beyond, self.refused, self.fallen_back):
            counter.inc(0)
        allocated = backend.token_to_kv_pool.layer_bytes()
        self.bytes.labels("global", "allocated").set(allocated["main_kv"] + allocated["index_k"])
        self.bytes.labels("swa", "allocated").set(allocated["swa_kv"])

    def around(self, build: Any) -> Any:
        def counted(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                result = build(forward_batch, *args, **kwargs)
            except Exception:
                self.refused.inc()
                raise
            if not (forward_batch.forward_mode.is_idle() or kwargs.get("in_capture")):
                self.forward(forward_batch)
            return result

        return counted

    def forward(self, batch: Any) -> None:
        lengths = batch.seq_lens_cpu.tolist()
        counts = [1] * len(lengths) if batch.forward_mode.is_decode() else list(batch.extend_seq_lens_cpu)
        self.rows.inc(sum(counts))
        self.beyond.inc(rows_beyond_pool(self.backend.plan, counts, lengths))
        self.fallen_back.inc(self.backend.ops.name != self.route)
        # Built before the backend or after it, by the kind of pool.
        allocator = getattr(self.runner, "token_to_kv_pool_allocator", None)
        if allocator is not None:
            plan, layout = self.backend.plan, self.backend.token_to_kv_pool.layout
            held = allocator.size_full - allocator.full_available_size()
            self.bytes.labels("global", "used").set(held * global_bytes_per_token(plan, layout))
            held = allocator.size_swa - allocator.swa_available_size()
            self.bytes.labels("swa", "used").set(held * swa_bytes_per_slot(plan, layout))


def rows_beyond_pool(plan: Any, counts: list[int], lengths: list[int]) -> int:
    """Rows that see more entries than a candidate pool holds; 0 for a model without one."""
    source = plan.config.candidate_source_layer_id
    if source is None:
        return 0
    ratio = plan[source].ratio
    # The longest context whose entries all fit.
    fits = (plan.config.candidate_pool_entries + 1) * ratio - 1
    return sum(max(0, length - max(fits, length - count)) for count, length in zip(counts, lengths, strict=True))
