"""The planner against the pool that the host builds, byte for byte; test_tools_served.py asks a server."""

from __future__ import annotations

from harness import Bench

from sglang_csa2.tools.budget import CSA2, STOCK, Budget, Serving


def test_buffers_are_those_of_the_pool():
    bench = Bench(pages=24)
    tokens = 24 * 256
    # The harness fixes eight requests and as many window slots as tokens; the planner derives window slots.
    budget = Budget(bench.plan, CSA2, Serving(max_running_requests=8, context_length=1024))
    planned, built = budget.buffers(tokens), bench.pool.layer_bytes()
    window = (tokens + 256) * budget.swa_per_slot
    assert planned | {"swa_kv": window} == built
    per_slot = sum(bench.pool.swa_cache(layer.layer_id).shape[1] for layer in bench.plan.layers)
    assert budget.swa_per_slot == per_slot


def test_stock_records_are_the_hosts():
    """The other column of the table: the host's layout classes say what its own records take."""
    from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout

    for ratio in (1, 2):
        slots = 256 // ratio
        assert STOCK.main_per_entry(ratio) == KVLayout.V4.page_bytes(slots) / slots
        assert CSA2.main_per_entry(ratio) == KVLayout.V41_FP4_NEW.page_bytes(slots) / slots
    assert STOCK.swa_per_slot == KVLayout.V4.page_bytes(256) / 256
    assert CSA2.swa_per_slot == KVLayout.V41_NEW.page_bytes(256) / 256
