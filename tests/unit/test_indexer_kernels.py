"""Which kernels the GPU indexer takes, and what it says of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")

from sglang_csa2 import indexer_cuda
from sglang_csa2.config import Csa2Config

TINY = json.loads((Path(__file__).parents[2] / "configs" / "tiny-dsv41" / "config.json").read_text())


def _name(monkeypatch, missing=None, **changes):
    monkeypatch.setattr(indexer_cuda.cuda_build, "missing", lambda capability: missing)
    return indexer_cuda.choose_kernels(Csa2Config.from_hf(TINY | changes), 90).name


def test_cuda_where_it_can_serve(monkeypatch):
    assert _name(monkeypatch).startswith("CUDA C++")


@pytest.mark.parametrize(
    ("missing", "changes", "reason"),
    [
        ("no nvcc here", {}, "no nvcc here"),
        (None, {"index_n_heads": 64}, "not 64"),
        (None, {"candidate_topk_blocks": 4096}, "not 4096"),
    ],
)
def test_triton_elsewhere_says_why(missing, changes, reason, monkeypatch):
    name = _name(monkeypatch, missing, **changes)
    assert name.startswith("Triton (") and reason in name
