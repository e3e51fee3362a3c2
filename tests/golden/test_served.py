"""The served tiny model against the published code's log-probabilities: whole prompts, chunked, with radix hits."""

from __future__ import annotations

import statistics

import pytest
from served import CASE_BOUND, MARGIN, MEAN_BOUND, golden_cases, log_probabilities, serve

pytestmark = pytest.mark.server
CASES = golden_cases("tiny-dsv41")


def check_cases(server) -> list[int]:
    """Compare every case; returns how many tokens of each came from the prefix cache."""
    differences, cached = [], []
    for case in CASES:
        answer = log_probabilities(server, case["input_ids"], case["top20_ids"])
        pairs = zip(answer["logprobs"], case["top20_logprobs"], strict=True)
        differences.append(statistics.fmean(abs(mine - golden) for mine, golden in pairs))
        cached.append(answer["cached"])
        assert differences[-1] <= CASE_BOUND, f"case of {len(case['input_ids'])} tokens"
        for mine, golden, margin in zip(answer["ids"], case["greedy_ids"], case["greedy_margins"], strict=True):
            if margin <= MARGIN:
                break
            assert mine == golden, f"case of {len(case['input_ids'])} tokens"
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
