"""Two ranks, 32 heads each: the golden values again. Needs two GPUs."""

from __future__ import annotations

import statistics

import pytest
import torch

pytest.importorskip("sglang", reason="the host stack is not installed: only the kernel tests run here")
if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

from served import CASE_BOUND_64H, MEAN_BOUND_64H, golden_differences, serve

pytestmark = pytest.mark.server
# Without the fusion: building its kernels takes longer than all else.
TWO_RANKS = ["--tp-size", "2", "--enforce-disable-flashinfer-allreduce-fusion"]


def test_golden_values_on_two_ranks(tiny_model_64h):
    with serve("--skip-tokenizer-init", *TWO_RANKS, model=tiny_model_64h, device="cuda") as server:
        differences, _ = golden_differences(server, "tiny-dsv41-64h")
        print(f"\nTP2: mean {statistics.fmean(differences):.4f}, worst {max(differences):.4f}")
    assert max(differences) <= CASE_BOUND_64H
    assert statistics.fmean(differences) <= MEAN_BOUND_64H
