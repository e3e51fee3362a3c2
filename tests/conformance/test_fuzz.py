"""The differential fuzzer for a minute, and the schedules that once failed."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import fuzz
import pytest
from answers import TOP
from fuzz_engine import Answer, EngineDied, EngineProcess, _answer
from fuzz_schedule import EngineConfig, Request, Schedule, draw_schedule, smaller

SAVED = sorted((Path(__file__).parent / "schedules").glob("*.json"))


@pytest.mark.server
def test_a_minute_of_fuzzing(tiny_model, tmp_path):
    seed = str(random.SystemRandom().randrange(1 << 30))
    fuzzer = fuzz.Fuzzer(exact=False, logs=tmp_path)
    problems = fuzzer.run(1.0, seed)
    print(f"seed {seed}: {fuzzer.tally}")
    assert problems == [], f"seed {seed}"
    assert fuzzer.tally.compared > 0 and fuzzer.tally.engines["checks"] > 0
    # The first engine's requests ask for log-probabilities.
    assert fuzzer.tally.differences


@pytest.mark.server
@pytest.mark.parametrize("path", SAVED, ids=lambda path: path.stem)
def test_a_saved_schedule(tiny_model, tmp_path, path):
    assert fuzz.Fuzzer(exact=False, logs=tmp_path).replay(Schedule.load(path)) == []


def test_a_schedule_survives_its_file(tmp_path):
    schedule = draw_schedule("7/1", EngineConfig.draw(random.Random(7), replay=False))
    schedule.save(tmp_path / "a.json")
    assert Schedule.load(tmp_path / "a.json") == schedule == draw_schedule("7/1", schedule.engine)
    assert [len(request.input_ids) for request in schedule.requests] == [r.shared + r.own for r in schedule.requests]


def test_a_schedule_of_before_checks_loads_without_them(tmp_path):
    schedule = draw_schedule("7/1", EngineConfig(check=True))
    schedule.save(tmp_path / "a.json")
    raw = json.loads((tmp_path / "a.json").read_text())
    assert raw["engine"].pop("check") is True
    (tmp_path / "a.json").write_text(json.dumps(raw))
    assert Schedule.load(tmp_path / "a.json").engine == EngineConfig(check=False)


def test_engines_are_of_every_kind():
    kinds = [fuzz.kind(number) for number in range(16)]
    assert sum(kind["check"] for kind in kinds) == 8 and kinds[0]["check"]
    assert sum(kind["replay"] for kind in kinds) == 4
    assert {kind["check"] for kind in kinds if kind["replay"]} == {True, False}
    rng, tally = random.Random(7), fuzz.Tally()
    for kind in kinds * 4:
        tally.start(EngineConfig.draw(rng, **kind))
    assert tally.engines["checks"] == 32 and tally.engines["bounded replay"] == 16
    for what in ("mixed chunks", "a small pool", "a prefix cache"):
        assert 0 < tally.engines[what] < 64
    assert "32 with checks" in str(tally)


def test_a_run_ends_in_time_and_starts_no_engine_in_vain():
    last = fuzz.SCHEDULES_PER_ENGINE
    assert not fuzz.is_enough(0, 60) and not fuzz.is_enough(last - 1, 600) and not fuzz.is_enough(last + 1, 20)
    assert fuzz.is_enough(last, 600) and fuzz.is_enough(0, -1) and fuzz.is_enough(last + 1, -1)


def test_schedules_are_of_every_kind():
    """Prompts in chunks of every size, prefixes of whole pages that several share, more than a small pool holds."""
    schedules = [draw_schedule(f"7/{n}", EngineConfig()) for n in range(200)]
    requests = [request for schedule in schedules for request in schedule.requests]
    assert {request.shared for request in requests} >= {0, 127, 256, 257, 512}
    assert all(any(len(request.input_ids) > size for request in requests) for size in (256, 512, 1024))
    assert any(request.abort_after for request in requests) and any(request.abort_delay for request in requests)

    def prefixes(schedule: Schedule) -> list[int]:
        return [request.prefix_seed for request in schedule.requests if request.shared in (256, 512)]

    assert sum(len(prefixes(s)) > len(set(prefixes(s))) for s in schedules) > 20


def test_shrinking_only_makes_smaller():
    schedule = draw_schedule("7/1", EngineConfig())

    def size(s: Schedule) -> int:
        return sum(r.own + r.shared + r.new_tokens + bool(r.arrives_after) for r in s.requests)

    assert all(size(candidate) < size(schedule) for candidate in smaller(schedule))


class Stub:
    """An engine that answers as told."""

    def __init__(self, answer: Answer, alone: Answer, forced: list | None = None, decoded: int = 0):
        """forced: log-probabilities of tokens that are the best, or pairs with how far below it they are."""
        self._answer, self._alone, self._decoded, self._played = answer, alone, decoded, False
        self._forced = [one if isinstance(one, tuple) else (one, 0.0) for one in forced or []]

    def run(self, schedule):
        self._played = True
        return [self._answer]

    def alone(self, ids, new_tokens):
        return self._alone

    def forced(self, ids, start):
        return self._forced

    def decode_rows(self):
        return self._decoded * self._played


def answer(ids: list[int], chosen: list[float], margin: float = 1.0, **changes) -> Answer:
    """Of each step the twenty best: the token, then others below it that every answer has."""
    top = [
        [(value, token)] + [(-1.0 - margin - 0.1 * n, 100 + n) for n in range(19)]
        for value, token in zip(chosen, ids, strict=True)
    ]
    return replace(Answer(finish="length", ids=ids, chosen=chosen, top=top), **changes)


def shifted(mine: Answer, by: float) -> Answer:
    """The same with the first step's best moved."""
    return replace(mine, top=[[(value + by, token) for value, token in mine.top[0]], *mine.top[1:]])


def strangers(mine: Answer, count: int) -> Answer:
    """The same with that many of the first step's best tokens exchanged for others."""
    first = mine.top[0]
    return replace(mine, top=[first[: TOP - count] + [(v, 500 + t) for v, t in first[TOP - count :]], *mine.top[1:]])


def judged(
    tmp_path, mine: Answer, alone: Answer, forced=None, *, engine=None, exact=False, decoded=0, **request
) -> tuple:
    asked = Request(**{"prefix_seed": 1, "shared": 0, "own_seed": 1, "own": 3, "new_tokens": 2} | request)
    fuzzer = fuzz.Fuzzer(exact=exact, logs=tmp_path)
    schedule = Schedule("1", engine or EngineConfig(), (asked,))
    return fuzzer.check(Stub(mine, alone, forced, decoded), schedule), fuzzer.tally


BOTH = answer([5, 6], [-1.0, -1.0])
THIN = answer([5, 6], [-1.0, -1.0], 0.2)


@pytest.mark.parametrize(
    ("mine", "theirs", "forced", "problem"),
    [
        (BOTH, BOTH, [], None),
        (answer([5, 7], [-1.0, -1.0]), BOTH, [], "token 1 is 7, alone 6"),
        (answer([5, 7], [-1.0, -1.0], 0.2), THIN, [-1.0, -1.1], None),
        (answer([5, 7], [-1.0, -1.0], 0.2), THIN, [-1.0, -1.5], "differ by 0.250"),
        (answer([5, 6], [-1.0, -1.3]), BOTH, [], "differ by 0.150"),
        (answer([5, 6], [-1.0, math.nan]), BOTH, [], "differ by nan"),
        (Answer(finish="abort"), BOTH, [], "ended as 'abort' after 0 tokens"),
        (answer([5], [-1.0]), BOTH, [], "ended as 'length' after 1 tokens"),
        (replace(BOTH, chosen=[-1.0]), BOTH, [], "after 2 tokens with 1 log-probabilities"),
        (replace(BOTH, top=BOTH.top[:1]), BOTH, [], "ended as 'length' after 2 tokens"),
        (BOTH, replace(BOTH, finish="abort"), [], "alone it ended as 'abort'"),
        (BOTH, answer([5], [-1.0]), [], "alone it ended as 'length' after 1 tokens"),
        # The best after the prompt, whatever tokens were chosen.
        (shifted(BOTH, 0.13), BOTH, [], "differ by 0.130"),
        (shifted(answer([7, 8], [-1.0, -1.0], 0.2), 0.2), THIN, [-1.0, -1.0], "differ by 0.200"),
        (shifted(BOTH, math.nan), BOTH, [], "differ by nan"),
        (strangers(BOTH, 5), BOTH, [], None),
        (strangers(BOTH, 6), BOTH, [], "only 14 of the 20 best"),
        (strangers(BOTH, 20), BOTH, [], "only 0 of the 20 best"),
        (strangers(answer([7, 8], [-1.0, -1.0], 0.2), 6), THIN, [-1.0, -1.0], "only 13 of the 20 best"),
    ],
)
def test_the_judge(tmp_path, mine, theirs, forced, problem):
    found, tally = judged(tmp_path, mine, theirs, forced)
    assert (found == []) if problem is None else (len(found) == 1 and problem in found[0])
    assert tally.aborted == 0


@pytest.mark.parametrize(
    ("mine", "forced", "problem", "compared"),
    [
        (Answer(), [], None, 0),
        (answer([5], [-1.0]), [], None, 1),
        (BOTH, [], None, 1),
        (answer([7], [-1.0]), [], "token 0 is 7, alone 5", 1),
        (answer([5], [-1.2]), [], "differ by 0.200", 1),
        (answer([5, 6, 6], [-1.0] * 3), [], "gave 3 tokens and was asked for 2", 1),
        # Its log-probabilities may have stayed behind.
        (replace(BOTH, chosen=[], top=[]), [], None, 1),
        (replace(BOTH, chosen=[-1.0]), [], None, 1),
        (replace(answer([5, 7], [-1.0, -1.0]), chosen=[], top=[]), [], "token 1 is 7, alone 6", 1),
        (replace(BOTH, chosen=[-1.2], top=BOTH.top[:1]), [], "differ by 0.200", 1),
        (strangers(answer([5], [-1.0]), 6), [], "only 14 of the 20 best", 1),
    ],
)
@pytest.mark.parametrize("abort", [{"abort_after": 1}, {"abort_delay": 0.1}])
def test_an_aborted_request_is_held_to_what_it_gave(tmp_path, mine, forced, problem, compared, abort):
    found, tally = judged(tmp_path, replace(mine, finish="abort"), BOTH, forced, **abort)
    assert (found == []) if problem is None else (len(found) == 1 and problem in found[0])
    assert (tally.aborted, tally.aborted_compared) == (1, compared)


def test_an_aborted_request_that_parted_at_a_thin_margin_is_forced(tmp_path):
    mine = answer([5, 7], [-1.0, -1.0], 0.2, finish="abort")
    assert judged(tmp_path, mine, THIN, [-1.0, -1.0], abort_after=1)[0] == []
    (problem,), tally = judged(tmp_path, mine, THIN, [-1.0, -1.5], abort_after=1)
    assert "differ by 0.250" in problem and tally.forced == 1


def test_a_forced_token_far_below_the_best(tmp_path):
    mine = answer([5, 7], [-1.0, -1.0], 0.2)
    assert judged(tmp_path, mine, THIN, [(-1.0, 0.0), (-1.1, 0.3)])[0] == []
    (problem,), _ = judged(tmp_path, mine, THIN, [(-1.0, 0.0), (-1.1, 0.4)])
    assert "token 1, 7, is 0.400 below the best of a forced run" in problem
    assert judged(tmp_path, mine, THIN, [(-1.0, 0.0), (-1.1, 0.4)], engine=EngineConfig(replay=True))[0] == []


def test_a_thin_margin_excuses_its_own_token_alone(tmp_path):
    """The first token's best two are close, the second's are not, and the second is another."""
    theirs = answer([5, 6], [-1.0, -1.0])
    theirs.top[0] = answer([5], [-1.0], 0.1).top[0]
    (problem,), _ = judged(tmp_path, answer([5, 7], [-1.0, -1.0]), theirs, [-1.0, -1.0])
    assert "token 1 is 7, alone 6, at a margin of" in problem


def test_mixed_chunks_are_asked_for_tokens_alone(tmp_path):
    mixed = {"engine": EngineConfig(chunked_prefill_size=512, mixed_chunk=True)}
    plain = replace(BOTH, chosen=[], top=[])
    found, tally = judged(tmp_path, plain, BOTH, **mixed)
    # Neither token came from a decode batch, and one of them from the request's own prefill.
    assert (found, tally.equal_tokens, tally.equal, tally.mixed, tally.differences) == ([], 1, 0, 1, [])
    assert judged(tmp_path, plain, BOTH, decoded=1, **mixed)[1].mixed == 0
    (problem,), _ = judged(tmp_path, replace(plain, ids=[5, 7]), BOTH, **mixed)
    assert "token 1 is 7, alone 6" in problem
    (problem,), _ = judged(tmp_path, replace(plain, ids=[5, 7]), THIN, [(-1.0, 0.0), (-1.0, 0.5)], **mixed)
    assert "0.500 below the best" in problem
    # The host would not have mixed it.
    (problem,), _ = judged(tmp_path, BOTH, BOTH, **mixed)
    assert "with 2 log-probabilities" in problem


@pytest.mark.parametrize("number", range(8))
def test_engines_that_mix_have_chunks_that_the_host_mixes(number):
    config = EngineConfig.draw(random.Random(number), **fuzz.kind(number))
    assert config.mixed_chunk == (number % 4 in (1, 2)) and (number > 0 or config.check)
    assert not config.mixed_chunk or config.chunked_prefill_size >= 512


def test_exact_asks_for_equal_log_probabilities(tmp_path):
    mine = answer([5, 6], [-1.0, -1.001])
    assert judged(tmp_path, mine, BOTH)[0] == []
    assert "not equal" in judged(tmp_path, mine, BOTH, exact=True)[0][0]
    assert judged(tmp_path, answer([5], [-1.0], finish="abort"), BOTH, exact=True, abort_after=1)[0] == []


def test_bounded_replay_has_its_own_bound(tmp_path):
    for config, problems in ((EngineConfig(replay=True), 0), (EngineConfig(), 1)):
        assert len(judged(tmp_path, answer([5, 6], [-1.0, -1.4]), BOTH, engine=config)[0]) == problems


def chunk(ids: list[int], chosen: list[float] | None, finish: str | None = None) -> dict:
    """A message of the host's stream."""
    meta = {"finish_reason": finish and {"type": finish}}
    if chosen is not None:
        meta |= {"output_token_logprobs": [(value, 5, None) for value in chosen]}
    return {"output_ids": ids, "meta_info": meta}


@pytest.mark.parametrize(
    ("last", "ids", "chosen"),
    [
        (chunk([5, 6, 7], [-1.0, -2.0, -3.0], "abort"), [5, 6, 7], [-1.0, -2.0, -3.0]),
        (chunk([5, 6, 7], None, "abort"), [5, 6, 7], [-1.0, -2.0]),
        (chunk([], None, "abort"), [5, 6], [-1.0, -2.0]),
    ],
)
def test_an_aborts_message_does_not_take_back_what_was_streamed(last, ids, chosen):
    before = _answer(chunk([5, 6], [-1.0, -2.0]), Answer(finish="abort"))
    answer = _answer(last, before)
    assert (before.finish, answer.finish, answer.ids, answer.chosen) == ("", "abort", ids, chosen)


DEATH = """\
  File "checks.py", line 151, in read
sglang_csa2.checks.CheckError: window KV of layer 3: slot 7 is read, but was not written
[2026-11-30 12:00:00] Received sigquit from a child process. It usually means the child failed.
"""


def test_a_death_by_a_check_says_which(tmp_path):
    """Though the end of the log is long past it."""
    log = tmp_path / "engine.log"
    log.write_text(DEATH * 2 + "later\n" * 2000)
    engine = EngineProcess.__new__(EngineProcess)
    engine.log_path, engine._process = log, SimpleNamespace(join=lambda seconds: None)
    assert engine.check_errors() == [
        "CheckError: window KV of layer 3: slot 7 is read, but was not written",
    ]
    assert str(engine._death("ended")).startswith("the engine ended, CheckError: window KV of layer 3: slot 7 is read")


class Dying(Stub):
    def run(self, schedule):
        raise EngineDied("the engine ended, CheckError: slot 7")

    def counts(self):
        return {}

    def check_errors(self):
        return []

    def close(self):
        pass


@pytest.mark.parametrize("method", ["counts", "run", "check_errors"])
def test_an_engine_that_dies_or_complains_is_a_mismatch(tmp_path, monkeypatch, method):
    engine = Dying(BOTH, BOTH)
    if method != "run":
        engine.run = lambda schedule: []
        asked = []

        def fails():
            asked.append(1)
            if method == "counts" and len(asked) % 2 == 0:
                raise EngineDied("the engine ended, CheckError: slot 7")
            return ["CheckError: slot 7"] if method == "check_errors" else {}

        setattr(engine, method, fails)
    fuzzer = fuzz.Fuzzer(exact=False, logs=tmp_path)
    monkeypatch.setattr(fuzzer, "engine", lambda config: engine)
    monkeypatch.setattr(fuzz, "SHRINK_SECONDS", 0)
    monkeypatch.setattr(fuzz, "SAVED", tmp_path)
    monkeypatch.setattr(fuzz, "draw_schedule", lambda seed, config: Schedule(seed, config, ()))
    (problem,) = fuzzer.run(1.0, "7")
    assert "CheckError: slot 7" in problem
    saved = list(tmp_path.glob("7-*.json"))
    assert len(saved) == (method == "run") and all("CheckError" in Schedule.load(path).note for path in saved)
    (problem,) = fuzzer.replay(Schedule("1", EngineConfig(), ()))
    assert "CheckError: slot 7" in problem
