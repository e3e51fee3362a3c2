"""The comparison of served answers can fail: each way in which two may differ, and what excuses a difference."""

from __future__ import annotations

import math

import books
import pytest
import served
import soak
from answers import CASE_BOUND, MARGIN, Tally, compare, compare_forced, forced_question, plain_question, question

PROMPT = [1, 2, 3]
# Per step the best tokens and how far each lies below the step's best.
WIDE, THIN = {5: 0.0, 6: 0.8, 7: 1.6}, {5: 0.0, 6: 0.1, 7: 0.9}
OFF = CASE_BOUND + 0.01


def an_answer(
    ids: list[int], steps: list[dict[int, float]], *, moved: dict[tuple[int, int], float] | None = None
) -> dict:
    """What /generate gives. moved: by (step, token), how far a log-probability is off."""
    tables = [
        {token: -1.0 - below + (moved or {}).get((step, token), 0.0) for token, below in table.items()}
        for step, table in enumerate(steps)
    ]
    entries = [[(value, token, None) for token, value in table.items()] for table in tables]
    meta = {
        "output_token_logprobs": [(table[token], token, None) for table, token in zip(tables, ids, strict=True)],
        "output_top_logprobs": [sorted(step, reverse=True) for step in entries],
        "output_token_ids_logprobs": entries,
    }
    return {"output_ids": ids, "meta_info": meta}


def plain(ids: list[int]) -> dict:
    return {"output_ids": ids, "meta_info": {}}


def forced_answer(ids: list[int], values: list[float], best: list[float]) -> dict:
    inputs = [(None, PROMPT[-1], None), *[(value, token, None) for value, token in zip(values, ids, strict=True)]]
    tops = [None, *[[(value, 99, None)] for value in best]]
    return {"meta_info": {"input_token_logprobs": inputs, "input_top_logprobs": tops}}


WANTED = an_answer([5, 5, 5], [WIDE, THIN, WIDE])


def test_what_is_asked():
    body = question(PROMPT, 3, WANTED)
    assert body["token_ids_logprob"] == [5, 6, 7] and body["return_logprob"] and body["top_logprobs_num"] == 20
    assert "token_ids_logprob" not in question(PROMPT, 3)
    assert set(plain_question(PROMPT, 3)) == {"input_ids", "sampling_params"}
    forced = forced_question(PROMPT, [5, 6])
    assert forced["input_ids"] == [*PROMPT, 5, 6] and forced["logprob_start_len"] == len(PROMPT) - 1


def test_equal_answers():
    found = compare(WANTED, WANTED)
    assert (found.problem, found.parted, found.tokens, found.values, found.difference) == (None, None, 3, 6, 0.0)
    found = compare(plain([5, 5, 5]), WANTED, measured=False)
    assert (found.problem, found.tokens, found.values) == (None, 3, 0)


def test_a_swap_of_near_ties_is_excused():
    found = compare(an_answer([5, 6, 7], [WIDE, {6: 0.0, 5: 0.02, 7: 0.9}, WIDE], moved={(1, 6): -0.05}), WANTED)
    assert found.problem is None and found.parted == 1 and found.tokens == 1
    # The three after the prompt, one equal token, both at the swap.
    assert found.values == 6 and 0 < found.difference <= CASE_BOUND
    assert compare(plain([5, 6, 7]), WANTED, measured=False).problem is None


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([5, 5], "2 tokens, not 3"),
        ([], "0 tokens, not 3"),
        ([6, 5, 5], "token 0 is 6, not 5, at a margin of 0.80"),
        # After a thin margin at which the tokens stayed equal, what comes before is equal still.
        ([5, 5, 6], "token 2 is 6, not 5, at a margin of 0.80"),
        # At a thin margin, but not the other of the two.
        ([5, 7, 5], f"token 1 is 7, not 5, and is not within {MARGIN} of the best"),
        ([5, 8, 5], f"token 1 is 8, not 5, and is not within {MARGIN} of the best"),
    ],
)
def test_wrong_tokens(ids, says, measured):
    steps = [WIDE | {8: 3.0}, THIN | {8: 3.0}, WIDE | {8: 3.0}][: len(ids)]
    found = compare(an_answer(ids, steps) if measured else plain(ids), WANTED, measured=measured)
    assert found.problem == says


@pytest.mark.parametrize(
    ("ids", "moved", "says"),
    [
        # One of the three after the prompt carries their mean beyond the bound; the tokens are equal.
        ([5, 5, 5], {(0, 7): 3 * OFF}, "the 3 best after the prompt differ by 0.130 on average"),
        ([5, 5, 5], {(1, 5): 3 * OFF}, "the log-probabilities of 3 equal tokens differ by 0.130 on average"),
        ([5, 5, 5], {(0, 7): math.nan}, "the 3 best after the prompt differ by nan on average"),
        # A wrong token at a thin margin: near a tie in the one, not in the other.
        ([5, 6, 5], {(1, 5): -OFF}, "where token 1 parts, the log-probabilities of 5 differ by 0.130"),
        ([5, 6, 5], {(1, 6): OFF}, "where token 1 parts, the log-probabilities of 6 differ by 0.130"),
        # The mean over both would be within the bound.
        ([5, 6, 5], {(1, 6): 1.5 * CASE_BOUND}, "where token 1 parts, the log-probabilities of 6 differ by 0.180"),
        # A margin at the first token hides nothing either.
        ([6, 5, 5], {(0, 7): 3 * OFF}, "the 3 best after the prompt differ by 0.130 on average"),
    ],
)
def test_wrong_log_probabilities(ids, moved, says):
    wanted = an_answer([5, 5, 5], [THIN, THIN, WIDE])
    found = compare(an_answer(ids, [THIN, THIN, WIDE], moved=moved), wanted)
    assert found.problem.startswith(says)


@pytest.mark.parametrize(
    ("values", "best", "problem"),
    [
        ([-1.0, -1.1, -1.0], [-1.0, -1.0, -1.0], None),
        ([-1.0, -1.1, -1.0], [-1.0, -1.0, -0.6], "token 2, 5, is 0.40 below the best of a forced run"),
        ([-1.0, -1.1, -1.0], [-1.0, -1.0, math.nan], "token 2, 5, is nan below the best of a forced run"),
        (
            [-1.0, -1.1, -1.5],
            [-1.0, -1.0, -1.5],
            "the log-probabilities of 3 tokens and of a forced run differ",
        ),
    ],
)
def test_tokens_beyond_a_thin_margin(values, best, problem):
    answer = an_answer([5, 6, 5], [WIDE, THIN, WIDE])
    found = compare(answer, WANTED)
    assert found.problem is None and found.parted == 1
    compare_forced(found, answer, forced_answer([5, 6, 5], values, best))
    assert found.beyond == 2
    assert found.problem is None if problem is None else found.problem.startswith(problem)


@pytest.mark.parametrize("found", [[5, 6, 5], [5, 0, 0], [0, 0, 0]])
def test_a_forced_run_of_other_tokens(found):
    mine = an_answer([5, 6, 7], [WIDE] * 3)
    with pytest.raises(ValueError, match="other tokens"):
        compare_forced(compare(mine, mine), mine, forced_answer(found, [-1.0] * 3, [-1.0] * 3))


def test_a_forced_run_in_which_the_host_names_the_last_token_0():
    mine = an_answer([9, 5, 9], [{9: 0.0, 5: 0.1}, THIN, {9: 0.0, 5: 0.1}])
    comparison = compare(mine, mine)
    compare_forced(comparison, mine, forced_answer([0, 5, 0], [-1.0] * 3, [-1.0] * 3))
    assert comparison.problem is None


def test_in_sum():
    swapped = an_answer([5, 6, 5], [WIDE, THIN, WIDE])
    tally = Tally(
        [compare(WANTED, WANTED), compare(swapped, WANTED), compare(plain([6, 5, 5]), WANTED, measured=False)]
    )
    assert tally.tokens == 4
    assert str(tally).startswith("3 answers compared: 1 equal token for token, 1 through log-probabilities beyond")


class Stub:
    """A server that gives one forced answer."""

    def __init__(self, forced: dict):
        self._forced, self.asked = forced, []

    def flush(self) -> None: ...

    def answer(self, body: dict) -> dict:
        self.asked.append(body)
        return self._forced


def test_a_test_fails_on_any_answer_and_on_none():
    served.assert_same_answers(Stub({}), [PROMPT], [plain([5, 5, 5])], [WANTED], measured=False)
    with pytest.raises(KeyError, match="output_token_logprobs"):
        served.assert_same_answers(Stub({}), [PROMPT], [plain([5, 5, 5])], [WANTED])
    with pytest.raises(AssertionError, match="prompt of 3 tokens: token 2 is 6, not 5"):
        served.assert_same_answers(Stub({}), [PROMPT] * 2, [WANTED, plain([5, 5, 6])], [WANTED] * 2, measured=False)
    with pytest.raises(AssertionError):
        served.assert_same_answers(Stub({}), [], [], [])
    stub = Stub(forced_answer([5, 6, 7], [-1.0, -1.1, -2.6], [-1.0, -1.0, -1.0]))
    with pytest.raises(AssertionError, match=r"token 2, 7, is 1\.60 below the best"):
        served.assert_same_answers(stub, [PROMPT], [plain([5, 6, 7])], [WANTED], measured=False)
    assert stub.asked == [forced_question(PROMPT, [5, 6, 7])]


def a_soak(monkeypatch, forced: dict) -> soak.Soak:
    run = soak.Soak("http://nowhere", seed=1, vocabulary=1024)
    run.prompts, run.wanted = [(PROMPT, 3)], [WANTED]
    monkeypatch.setattr(run, "flush", lambda: None)
    monkeypatch.setattr(run, "ask", lambda body: forced)
    return run


def test_a_soak_fails_on_what_differs(monkeypatch):
    forced = forced_answer([5, 6, 5], [-1.0, -1.1, -1.0], [-1.0, -1.0, -1.0])
    run = a_soak(monkeypatch, forced)
    run.answered = [(0, True, WANTED), (0, False, plain([5, 6, 5])), (0, False, plain([5, 6, 5]))]
    tally = run.compare()
    assert run.problems == [] and tally.tokens == 9 and len(tally) == 3
    moved = an_answer([5, 5, 5], [WIDE, THIN, WIDE], moved={(0, 7): 3 * OFF})
    # The last was asked for log-probabilities and has none.
    run.answered = [(0, True, WANTED), (0, True, moved), (0, False, plain([6, 5, 5])), (0, True, plain([5, 5, 5]))]
    tally = run.compare()
    assert len(run.problems) == 3 and len(tally) == 3 and "KeyError" in run.problems[2]


def test_a_soak_without_an_answer_fails(monkeypatch):
    run = a_soak(monkeypatch, {})
    run.compare()
    assert run.problems == ["no answer was compared"]


def test_counters_that_a_server_lacks_are_not_zero():
    zeros = dict.fromkeys(soak.STAY_ZERO, 0.0)
    assert soak.counters(zeros).endswith("are all 0")
    assert soak.counters(zeros | {soak.STAY_ZERO[0]: 2.0}).endswith("are not all 0")
    said = soak.counters({"kv_used_tokens": 0.0})
    assert said.startswith("NOT KNOWN") and all(name in said for name in soak.STAY_ZERO) and " 0" not in said


def test_how_requests_ran():
    log = "Decode batch, #running-req: 2, x\nDecode batch, #running-req: 3, y\n"
    found = [{"output_ids": [1] * 4, "meta_info": {"num_retractions": retractions}} for retractions in (0, 1)]
    assert books.decode_rows(log) == [2, 3]
    # Three and two tokens that no first prefill gave; five rows of decode batches.
    assert served.mixed_tokens(log, found) == 0 and served.mixed_tokens("", found) == 5
