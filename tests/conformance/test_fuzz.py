"""The differential fuzzer for a minute, and the schedules that once failed."""

from __future__ import annotations

import random
from pathlib import Path

import fuzz
import pytest
from fuzz_engine import Answer
from fuzz_schedule import EngineConfig, Schedule, draw_schedule, smaller

SAVED = sorted((Path(__file__).parent / "schedules").glob("*.json"))


@pytest.mark.server
def test_a_minute_of_fuzzing(tiny_model, tmp_path):
    seed = str(random.SystemRandom().randrange(1 << 30))
    fuzzer = fuzz.Fuzzer(exact=False, logs=tmp_path)
    problems = fuzzer.run(1.0, seed)
    print(f"seed {seed}: {fuzzer.tally}")
    assert problems == [], f"seed {seed}"
    assert fuzzer.tally.compared > 0


@pytest.mark.server
@pytest.mark.parametrize("path", SAVED, ids=lambda path: path.stem)
def test_a_saved_schedule(tiny_model, tmp_path, path):
    assert fuzz.Fuzzer(exact=False, logs=tmp_path).replay(Schedule.load(path)) == []


def test_a_schedule_survives_its_file(tmp_path):
    schedule = draw_schedule("7/1", EngineConfig.draw(random.Random(7), replay=False))
    schedule.save(tmp_path / "a.json")
    assert Schedule.load(tmp_path / "a.json") == schedule == draw_schedule("7/1", schedule.engine)
    assert [len(request.input_ids) for request in schedule.requests] == [r.shared + r.own for r in schedule.requests]


def test_shrinking_only_makes_smaller():
    schedule = draw_schedule("7/1", EngineConfig())

    def size(s: Schedule) -> int:
        return sum(r.own + r.shared + r.new_tokens + bool(r.arrives_after) for r in s.requests)

    assert all(size(candidate) < size(schedule) for candidate in smaller(schedule))


class Stub:
    """An engine that answers as told."""

    def __init__(self, answer: Answer, alone: Answer, forced: list[float]):
        self._answer, self._alone, self._forced = answer, alone, forced

    def run(self, schedule):
        return [self._answer]

    def alone(self, ids, new_tokens):
        return self._alone

    def forced(self, ids, start):
        return self._forced


def answer(ids: list[int], chosen: list[float], margin: float = 1.0) -> Answer:
    top = [[(value, token), (value - margin, 0)] for value, token in zip(chosen, ids, strict=True)]
    return Answer(finish="length", ids=ids, chosen=chosen, top=top)


@pytest.mark.parametrize(
    ("mine", "theirs", "forced", "problem"),
    [
        (answer([5, 6], [-1.0, -1.0]), answer([5, 6], [-1.0, -1.0]), [], None),
        (answer([5, 7], [-1.0, -1.0]), answer([5, 6], [-1.0, -1.0]), [], "token 1 is 7, alone 6"),
        (answer([5, 7], [-1.0, -1.0], 0.2), answer([5, 6], [-1.0, -1.0], 0.2), [-1.0, -1.1], None),
        (answer([5, 7], [-1.0, -1.0], 0.2), answer([5, 6], [-1.0, -1.0], 0.2), [-1.0, -1.5], "differ by 0.250"),
        (answer([5, 6], [-1.0, -1.3]), answer([5, 6], [-1.0, -1.0]), [], "differ by 0.150"),
        (Answer(finish="abort"), answer([5, 6], [-1.0, -1.0]), [], "ended as 'abort' after 0 tokens"),
    ],
)
def test_the_judge(tmp_path, mine, theirs, forced, problem):
    schedule = draw_schedule("1", EngineConfig())
    request = next(r for r in schedule.requests)
    request = type(request)(prefix_seed=1, shared=0, own_seed=1, own=3, new_tokens=2)
    schedule = type(schedule)("1", schedule.engine, (request,))
    found = fuzz.Fuzzer(exact=False, logs=tmp_path).check(Stub(mine, theirs, forced), schedule)
    assert (found == []) if problem is None else (len(found) == 1 and problem in found[0])
