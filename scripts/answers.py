"""Two answers of a server to one prompt: are they the same?

Greedy answers may part where the best two tokens nearly tie, and after that their tokens differ by right. No comparison
is empty for that. Whatever the margin, the log-probabilities of the TOP best tokens after the prompt are compared, and
those of every token up to the first that differs. There, what comes before is still equal: only a margin of at most
MARGIN excuses the swap, and both tokens' log-probabilities are compared. The tokens beyond are compared with a forced
run: the server reads prompt and answer as one prompt. Each must be within MARGIN of the best token at its place, and
its log-probability what it was in the answer. The bounds are those of tests/golden/README.md.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

CASE_BOUND, MARGIN, TOP = 0.12, 0.3, 20


def question(prompt: list[int], new_tokens: int, wanted: dict | None = None) -> dict:
    """A body for /generate; with `wanted`, an answer to it, the tokens that `compare` looks for are asked for."""
    sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": TOP}
    if wanted is not None:
        first = [token for _, token, *_ in wanted["meta_info"]["output_top_logprobs"][0]]
        body["token_ids_logprob"] = list(dict.fromkeys(first + wanted["output_ids"]))
    return body


def plain_question(prompt: list[int], new_tokens: int) -> dict:
    """The same without log-probabilities: the host mixes no prefill into a decode batch that asks for them."""
    body = question(prompt, new_tokens)
    return {name: body[name] for name in ("input_ids", "sampling_params")}


def forced_question(prompt: list[int], ids: list[int]) -> dict:
    """A body whose answer `compare_forced` reads: prompt and answer as one prompt, with the best token everywhere."""
    logprobs = {"return_logprob": True, "logprob_start_len": len(prompt) - 1, "top_logprobs_num": 1}
    return plain_question(prompt + ids, 1) | logprobs


@dataclass
class Comparison:
    """What was found. tokens: equal ones; beyond: those of a forced run; parted: the step where near ties swapped."""

    tokens: int = 0
    beyond: int = 0
    values: int = 0
    parted: int | None = None
    difference: float = 0.0
    problem: str | None = None

    def bound(self, what: str, mine: Iterable[float], theirs: Iterable[float]) -> None:
        """Hold a mean absolute difference to CASE_BOUND."""
        differences = [abs(a - b) for a, b in zip(mine, theirs, strict=True)]
        if not differences:
            return
        self.values += len(differences)
        mean = statistics.fmean(differences)
        self.difference = max(self.difference, mean)
        # So that NaN is not within the bound.
        if not mean <= CASE_BOUND:
            self.fail(f"{what} differ by {mean:.3f} on average, more than {CASE_BOUND}")

    def fail(self, problem: str) -> None:
        """Keep the first problem."""
        self.problem = self.problem or problem


def compare(answer: dict, wanted: dict, *, measured: bool = True) -> Comparison:
    """An answer to `question`, whole or the last of a stream, against another; measured: False for `plain_question`."""
    found, mine, theirs = Comparison(), answer["output_ids"], wanted["output_ids"]
    if len(mine) != len(theirs) or not mine:
        found.fail(f"{len(mine)} tokens, not {len(theirs)}")
        return found
    same = next((step for step, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), len(mine))
    found.tokens = same
    if same < len(mine):
        found.parted = same
        _compare_swap(found, mine[same], theirs[same], wanted["meta_info"]["output_top_logprobs"][same])
    if measured:
        _compare_values(found, answer["meta_info"], wanted, same)
    return found


def judge(
    prompt: list[int], answer: dict, wanted: dict, force: Callable[[list[int], list[int]], dict], *, measured: bool
) -> Comparison:
    """`compare`, and where near ties swapped `compare_forced` with what `force(prompt, ids)` answers."""
    found = compare(answer, wanted, measured=measured)
    if found.parted is not None and found.problem is None:
        compare_forced(found, answer, force(prompt, answer["output_ids"]))
    return found


def _compare_swap(found: Comparison, mine: int, theirs: int, top: list) -> None:
    margin, what = top[0][0] - top[1][0], f"token {found.parted} is {mine}, not {theirs}"
    if not margin <= MARGIN:
        found.fail(f"{what}, at a margin of {margin:.2f}")
    elif not top[0][0] - _by_token(top).get(mine, -math.inf) <= MARGIN:
        found.fail(f"{what}, and is not within {MARGIN} of the best")


def _compare_values(found: Comparison, meta: dict, wanted: dict, same: int) -> None:
    chosen, asked = meta["output_token_logprobs"], meta["output_token_ids_logprobs"]
    tops = wanted["meta_info"]["output_top_logprobs"]
    first, here = _by_token(tops[0]), _by_token(asked[0])
    found.bound(f"the {len(first)} best after the prompt", [here[token] for token in first], first.values())
    values = [[entry[0] for entry in each[:same]] for each in (chosen, wanted["meta_info"]["output_token_logprobs"])]
    found.bound(f"the log-probabilities of {same} equal tokens", *values)
    if found.parted is None or found.problem is not None:
        return
    # Each by itself: a mean would hide one behind the other.
    here, there, theirs = _by_token(asked[same]), _by_token(tops[same]), wanted["output_ids"][same]
    for token, value in ((theirs, here[theirs]), (chosen[same][1], chosen[same][0])):
        found.bound(f"where token {same} parts, the log-probabilities of {token}", [value], [there[token]])


def compare_forced(found: Comparison, answer: dict, forced: dict) -> None:
    """Add to a comparison: each token of an answer against the answer to its `forced_question`."""
    ids = answer["output_ids"]
    for step, below in enumerate(below_the_best(forced, ids)):
        if not below <= MARGIN:
            found.fail(f"token {step}, {ids[step]}, is {below:.2f} below the best of a forced run")
    if chosen := answer["meta_info"].get("output_token_logprobs"):
        what = f"the log-probabilities of {len(ids)} tokens and of a forced run"
        entries = forced["meta_info"]["input_token_logprobs"][-len(ids) :]
        found.bound(what, [entry[0] for entry in chosen], [entry[0] for entry in entries])
    found.beyond = len(ids) - found.tokens


def below_the_best(forced: dict, ids: list[int]) -> list[float]:
    """How far each of the last tokens of a forced run lies below the best at its place; 0 where it is the best."""
    meta = forced["meta_info"]
    entries, tops = meta["input_token_logprobs"][-len(ids) :], meta["input_top_logprobs"][-len(ids) :]
    found, last = [token for _, token, *_ in entries], max(ids)
    # The host names the vocabulary's last token 0 there (logprob_result_processor.py:54); its value is that token's.
    if any(name != token and (name, token) != (0, last) for name, token in zip(found, ids, strict=True)):
        raise ValueError(f"the forced run has other tokens: {found}, not {ids}")
    return [top[0][0] - value for (value, *_), top in zip(entries, tops, strict=True)]


def _by_token(entries: list) -> dict[int, float]:
    return {token: value for value, token, *_ in entries}


class Tally(list[Comparison]):
    """Comparisons in sum."""

    @property
    def tokens(self) -> int:
        """Tokens that were compared at all."""
        return sum(one.tokens + one.beyond for one in self)

    def __str__(self) -> str:
        sound = [one for one in self if one.problem is None]
        equal, largest = sum(one.parted is None for one in sound), max((one.difference for one in self), default=0.0)
        return (
            f"{len(self)} answers compared: {equal} equal token for token, {len(sound) - equal} through "
            f"log-probabilities beyond a thin margin; {self.tokens} tokens and {sum(one.values for one in self)} "
            f"log-probabilities, the largest mean difference {largest:.4f}"
        )
