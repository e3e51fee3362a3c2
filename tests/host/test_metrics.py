"""The counts behind the metrics; tests/conformance/test_scheduler.py reads them from a server."""

from __future__ import annotations

import pytest
from harness import Bench, Request, tiny_config

from sglang_csa2.layer_plan import LayerPlan
from sglang_csa2.metrics import rows_beyond_pool


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
