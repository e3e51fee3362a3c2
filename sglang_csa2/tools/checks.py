"""What `verify` asks of a server and how it judges the answers.

A server and the plain model round in different places, and a network amplifies that: on the tiny model the mean
difference of a prompt's log-probabilities is 0.02 to 0.04, while a wrong index_topk (48 for 64) or a missing
candidate pool moves a prompt of 700 tokens by 0.09 to 0.12. The bounds lie between. Selections agree less with
depth, because near scores change places: of the entries of the rows that have to choose, 87 % and more are the same,
and 75 % at most in the layers that those faults touch.
"""

from __future__ import annotations

import json
import random
import statistics
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sglang_csa2.tools.recorded import Recording

MEAN_BOUND, SHARE_BOUND = 0.06, 0.8
# A greedy token is compared only where the best candidate leads by more than noise.
MARGIN = 0.3


class ServerError(RuntimeError):
    """The server cannot be reached or answers an error."""


@dataclass(frozen=True)
class Answer:
    """Log-probabilities of each prompt token but the first, and the greedy next token."""

    logprobs: list[float]
    next_id: int


@dataclass(frozen=True)
class Expectation:
    """The same of the plain model or a recording; `margin` is the lead of the next token over the second."""

    logprobs: list[float]
    next_id: int
    margin: float


@dataclass(frozen=True)
class Check:
    """One line of the verdict."""

    name: str
    passed: bool
    figures: str


class Source(Protocol):
    """Something that answers prompts of token ids."""

    def answer(self, input_ids: list[int]) -> Answer: ...


class HttpServer:
    """A running server."""

    def __init__(self, url: str, timeout: float = 600.0):
        self._url, self._timeout = url.rstrip("/"), timeout

    def info(self) -> dict[str, Any]:
        return self._ask("/server_info", None)

    def answer(self, input_ids: list[int]) -> Answer:
        return prompt_answer(self._generate(input_ids, logprob_start_len=0))

    def top_logprobs(self, input_ids: list[int], count: int = 20) -> tuple[dict[int, float], int]:
        """The largest log-probabilities after a prompt by token, and how many tokens came from the prefix cache."""
        meta = self._generate(input_ids, top_logprobs_num=count)["meta_info"]
        return {token: value for value, token, _ in meta["output_top_logprobs"][0]}, meta["cached_tokens"]

    def _generate(self, input_ids: list[int], **extra: Any) -> dict[str, Any]:
        sampling = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
        return self._ask(
            "/generate", {"input_ids": input_ids, "sampling_params": sampling, "return_logprob": True, **extra}
        )

    def _ask(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise ServerError(f"{self._url}{path} answers {error.code}: {error.read().decode()[:400]}") from error
        except OSError as error:
            raise ServerError(
                f"{self._url} cannot be reached ({error}): start the server, or leave --url out to run an engine here"
            ) from error


def prompt_answer(raw: dict[str, Any]) -> Answer:
    """Read an answer of /generate with log-probabilities from the prompt's start."""
    meta = raw["meta_info"]
    return Answer([entry[0] for entry in meta["input_token_logprobs"][1:]], meta["output_token_logprobs"][0][1])


def prompts(vocabulary: int, lengths: Sequence[int]) -> list[list[int]]:
    """Random prompts, the same on every machine; ids below 3 are the tiny models' special tokens."""
    return [random.Random(length).choices(range(3, vocabulary), k=length) for length in lengths]


def mean_difference(mine: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.fmean(abs(a - b) for a, b in zip(mine, theirs, strict=True)) if len(mine) else 0.0


def check_answers(
    asked: list[list[int]], answers: list[Answer], expected: list[Expectation], bound: float, against: str
) -> list[Check]:
    """Log-probabilities of every prompt token, and the next token where it is certain."""
    checks = []
    for ids, answer, wanted in zip(asked, answers, expected, strict=True):
        mean = mean_difference(answer.logprobs, wanted.logprobs)
        worst = max((abs(a - b) for a, b in zip(answer.logprobs, wanted.logprobs, strict=True)), default=0.0)
        figures = f"mean difference {mean:.4f} (bound {bound}), largest {worst:.3f}"
        certain = wanted.margin > MARGIN
        agrees = answer.next_id == wanted.next_id
        if certain:
            figures += f", next token {'the same' if agrees else f'{answer.next_id} for {wanted.next_id}'}"
        # NaN compares false, so it fails.
        passed = mean <= bound and (agrees or not certain)
        checks.append(Check(f"{against}, prompt of {len(ids)}", passed, figures))
    return checks


def check_selections(recordings: list[Recording], chosen: list[dict[int, Tensor]], bound: float) -> list[Check]:
    """Per index layer, the share of entries that the server and the plain model both chose.

    Over the rows that see more than they may choose; prompts without such a row say nothing here.
    """
    checks = []
    for layer_id in sorted(chosen[0]):
        shares = [
            agreement(mine, theirs)
            for recording, plain in zip(recordings, chosen, strict=True)
            for row, mine, theirs in _rows(recording, layer_id, plain[layer_id])
            if (row + 1) // recording.layers[layer_id].layer.ratio > mine.shape[0]
        ]
        if not shares:
            continue
        mean = statistics.fmean(shares)
        figures = f"{mean:.1%} of the entries the same (bound {bound:.0%}), worst row {min(shares):.1%}"
        checks.append(Check(f"selection of layer {layer_id}", mean >= bound, figures))
    return checks


def agreement(mine: Tensor, theirs: Tensor) -> float:
    """Entries in both choices [k] over those of the larger; -1 is no entry."""
    mine, theirs = mine[mine >= 0], theirs[theirs >= 0]
    return int(torch.isin(mine, theirs).sum()) / max(len(mine), len(theirs), 1)


def _rows(recording: Recording, layer_id: int, plain: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Position, the server's choice, the plain model's, row by row of the rows that the plain model has."""
    positions = recording.layers[layer_id].positions
    for index, row in enumerate(recording.rows.tolist()):
        if row < len(plain):
            yield row, positions[index], plain[row]


def check_repeats(server: HttpServer, asked: list[list[int]], bound: float) -> Check:
    """A long prompt twice: the prefix cache must not change the answer."""
    # A prompt of its own, so that the first answer is a cold one.
    longest = max(asked, key=len)[::-1]
    first, _ = server.top_logprobs(longest)
    again, cached = server.top_logprobs(longest)
    common = sorted(first.keys() & again.keys())
    mean = mean_difference([first[i] for i in common], [again[i] for i in common])
    passed = len(common) >= len(first) / 2 and mean <= bound
    figures = f"{cached} of {len(longest)} tokens from the prefix cache, mean difference {mean:.4f} (bound {bound})"
    return Check("the same prompt again", passed, figures)


def check_together(server: HttpServer, asked: list[list[int]], alone: list[Answer], bound: float) -> Check:
    """All prompts at once: batch mates must not change an answer."""
    with ThreadPoolExecutor(len(asked)) as executor:
        together = list(executor.map(server.answer, asked))
    mean = max(mean_difference(a.logprobs, b.logprobs) for a, b in zip(together, alone, strict=True))
    return Check("all prompts at once", mean <= bound, f"worst prompt's mean difference {mean:.4f} (bound {bound})")
