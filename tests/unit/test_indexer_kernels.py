"""Which kernels the GPU indexer takes for a model, and the reason that is given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")

from sglang_csa2 import routes
from sglang_csa2.config import Csa2Config

TINY = json.loads((Path(__file__).parents[2] / "configs" / "tiny-dsv41" / "config.json").read_text())
INDEX = (routes.SCAN, routes.CANDIDATES, routes.TOPK)


def _choices(monkeypatch, missing=None, **changes):
    monkeypatch.setattr(routes.cuda_build, "missing", lambda capability: missing)
    chosen = routes.choose(routes.Machine("cuda", 90, "a card"), routes.Flags(), Csa2Config.from_hf(TINY | changes))
    return [chosen[op] for op in INDEX]


def test_cuda_where_it_can_serve(monkeypatch):
    assert [choice.route.name for choice in _choices(monkeypatch)] == ["cuda"] * 3


@pytest.mark.parametrize(
    ("missing", "changes", "reason"),
    [
        ("no nvcc here", {}, "no nvcc here"),
        (None, {"index_n_heads": 64}, "not 64"),
        (None, {"candidate_topk_blocks": 4096}, "not 4096"),
    ],
)
def test_triton_elsewhere_says_why(missing, changes, reason, monkeypatch):
    for choice in _choices(monkeypatch, missing, **changes):
        assert choice.route.name == "triton" and reason in choice.reason
