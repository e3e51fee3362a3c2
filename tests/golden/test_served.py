"""The served tiny model against the published code's log-probabilities: whole prompts, chunked, with radix hits."""

from __future__ import annotations

import statistics

import pytest
from served import CASE_BOUND, MEAN_BOUND, golden_cases, golden_differences, serve

pytestmark = pytest.mark.server
CASES = golden_cases("tiny-dsv41")


def check_cases(server) -> list[int]:
    """Compare every case; returns how many tokens of each came from the prefix cache."""
    differences, cached = golden_differences(server, "tiny-dsv41")
    print(f"\nmean {statistics.fmean(differences):.4f}, worst {max(differences):.4f}")
    assert max(differences) <= CASE_BOUND
    assert statistics.fmean(differences) <= MEAN_BOUND
    return cached


@pytest.mark.parametrize("chunk", [256, 512, 4096])
def test_golden_cases(tiny_model, chunk):
    """Cold, then again on the cached prefixes: a hit changes neither bytes nor answers beyond the bounds."""
    with serve("--skip-tokenizer-init", "--chunked-prefill-size", str(chunk)) as server:
        cold = check_cases(server)
        warm = check_cases(server)
    assert max(cold) == 0
    longest = max(len(case["input_ids"]) for case in CASES)
    assert max(warm) == (longest - 1) // 256 * 256
