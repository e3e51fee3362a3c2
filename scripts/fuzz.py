"""Differential fuzzing: random schedules against a real SGLang engine, each request against itself run alone.

    python scripts/fuzz.py --minutes 60 [--seed 7] [--exact]       draw and run; exit status 1 on a mismatch
    python scripts/fuzz.py --replay tests/conformance/schedules/*.json     run saved schedules

A request that ends must give the tokens that it gives alone while every margin between the best two log-probabilities
is above 0.3; its log-probabilities stay within the golden bounds of the ones alone, or, where the tokens have parted
at a thin margin, of the ones forced along its own tokens. After each engine's schedules the pools' books are what they
were before. Every fourth engine runs decoder SWA bounded replay, which is approximate by design: there only
log-probabilities are compared, with a wider bound. `--exact` asks for equal log-probabilities wherever replay is off.

A failing schedule is made smaller for a while and saved as JSON under tests/conformance/schedules/.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from fuzz_engine import MODEL, Answer, EngineDied, EngineProcess
from fuzz_schedule import EngineConfig, Schedule, draw_schedule, smaller

SAVED = Path(__file__).parents[1] / "tests" / "conformance" / "schedules"
# tests/golden/README.md; the last is how far bounded replay may move a request's log-probabilities.
CASE_BOUND, MEAN_BOUND, MARGIN, REPLAY_BOUND = 0.12, 0.06, 0.3, 0.5
SCHEDULES_PER_ENGINE = 8
SHRINK_SECONDS = 300


@dataclass
class Tally:
    """What a run has seen."""

    schedules: int = 0
    engines: int = 0
    compared: int = 0
    equal: int = 0
    forced: int = 0
    aborted: int = 0
    retracted: int = 0
    cache_hits: int = 0
    tokens: int = 0
    differences: list[float] = field(default_factory=list)
    replay_differences: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        mean = statistics.fmean(self.differences) if self.differences else 0.0
        replay = max(self.replay_differences, default=0.0)
        return (
            f"{self.schedules} schedules on {self.engines} engines: {self.compared} requests compared ({self.equal} "
            f"equal to the last bit, {self.forced} forced), {self.aborted} aborted, {self.retracted} retracted, "
            f"{self.cache_hits} on cached prefixes, {self.tokens} tokens; difference without replay mean {mean:.4f} "
            f"max {max(self.differences, default=0.0):.4f}, with replay max {replay:.4f}"
        )


class Fuzzer:
    def __init__(self, *, exact: bool, logs: Path):
        self.exact, self.logs, self.tally = exact, logs, Tally()

    def engine(self, config: EngineConfig) -> EngineProcess:
        self.tally.engines += 1
        return EngineProcess(config, self.logs / f"engine-{self.tally.engines}.log")

    def check(self, engine: EngineProcess, schedule: Schedule) -> list[str]:
        """Play a schedule; the mismatches, each in a sentence."""
        answers = engine.run(schedule)
        self.tally.schedules += 1
        problems = []
        for index, (request, answer) in enumerate(zip(schedule.requests, answers, strict=True)):
            if answer.finish == "abort" and request.aborts:
                self.tally.aborted += 1
                continue
            if answer.finish != "length" or len(answer.ids) != request.new_tokens:
                problems.append(f"request {index} ended as {answer.finish!r} after {len(answer.ids)} tokens")
                continue
            alone = engine.alone(request.input_ids, request.new_tokens)
            problem = self._judge(engine, schedule, request.input_ids, answer, alone)
            if problem:
                problems.append(f"request {index} ({len(request.input_ids)} tokens): {problem}")
        return problems

    def _judge(self, engine, schedule: Schedule, prompt: list[int], answer: Answer, alone: Answer) -> str | None:
        tally, replay = self.tally, schedule.engine.replay
        tally.compared += 1
        tally.tokens += len(answer.ids)
        tally.retracted += answer.retractions > 0
        tally.cache_hits += answer.cached > 0
        same = next((i for i, (a, b) in enumerate(zip(answer.ids, alone.ids, strict=True)) if a != b), len(answer.ids))
        if same < len(answer.ids) and not replay and min(alone.margins[: same + 1]) > MARGIN:
            return f"token {same} is {answer.ids[same]}, alone {alone.ids[same]}, at a margin of {alone.margins[same]}"
        if same == len(answer.ids):
            difference = _distance(answer.chosen, alone.chosen)
        else:
            tally.forced += 1
            difference = _distance(answer.chosen, engine.forced(prompt + answer.ids, len(prompt)))
        if same:
            # The twenty best after the prompt, as the golden values have them.
            first = {token: value for value, token in alone.top[0]}
            both = [(value, first[token]) for value, token in answer.top[0] if token in first]
            difference = max(difference, statistics.fmean(abs(a - b) for a, b in both))
        tally.equal += answer.ids == alone.ids and answer.top == alone.top
        (tally.replay_differences if replay else tally.differences).append(difference)
        bound = REPLAY_BOUND if replay else CASE_BOUND
        if difference > bound:
            return f"log-probabilities differ by {difference:.3f} on average, more than {bound}"
        if self.exact and not replay and answer.top != alone.top:
            return f"log-probabilities are not equal (difference {difference:.6f})"
        return None

    def run(self, minutes: float, seed: str) -> list[str]:
        """Fuzz until the time is up or something fails; the first engine's start does not count."""
        deadline = None
        rng = random.Random(seed)
        while deadline is None or time.monotonic() < deadline:
            config = EngineConfig.draw(rng, replay=self.tally.engines % 4 == 3)
            engine = self.engine(config)
            try:
                baseline = engine.counts()
                deadline = deadline or time.monotonic() + minutes * 60
                for _ in range(SCHEDULES_PER_ENGINE):
                    if time.monotonic() > deadline:
                        break
                    schedule = draw_schedule(f"{seed}/{rng.randrange(1 << 30)}", config)
                    if problems := self._attempt(engine, schedule):
                        return self._fail(schedule, problems)
                if (books := engine.counts()) != baseline:
                    return [f"engine {config}: the pools' books are {books}, before {baseline}"]
            finally:
                engine.close()
            print(f"seed {seed}: {self.tally}", flush=True)
        if self.tally.differences and statistics.fmean(self.tally.differences) > MEAN_BOUND:
            return [f"the mean difference over all requests is above {MEAN_BOUND}: {self.tally}"]
        return []

    def replay(self, schedule: Schedule) -> list[str]:
        """A saved schedule on an engine of its own, and the pools' books."""
        engine = self.engine(schedule.engine)
        try:
            baseline = engine.counts()
            problems = self._attempt(engine, schedule)
            if not problems and (books := engine.counts()) != baseline:
                problems = [f"the pools' books are {books}, before {baseline}"]
            return problems
        finally:
            engine.close()

    def _attempt(self, engine: EngineProcess, schedule: Schedule) -> list[str]:
        try:
            return self.check(engine, schedule)
        except (EngineDied, RuntimeError) as error:
            return [str(error)]

    def _fail(self, schedule: Schedule, problems: list[str]) -> list[str]:
        path = SAVED / f"{schedule.seed.replace('/', '-')}.json"
        replace(schedule, note=problems[0][:300]).save(path)
        print(f"schedule {schedule.seed} fails, saved as {path}:\n  " + "\n  ".join(problems), flush=True)
        smallest = self._shrink(schedule)
        replace(smallest, note=problems[0][:300]).save(path)
        return [f"{path.name}: {problem}" for problem in problems]

    def _shrink(self, schedule: Schedule) -> Schedule:
        """The smallest failing schedule found in the time; a schedule that fails on a fresh engine only."""
        deadline = time.monotonic() + SHRINK_SECONDS
        engine, progress = None, True
        try:
            while progress and time.monotonic() < deadline:
                progress = False
                for candidate in smaller(schedule):
                    if time.monotonic() > deadline:
                        break
                    engine = engine or self.engine(schedule.engine)
                    if self._attempt(engine, candidate):
                        schedule, progress = candidate, True
                        engine.close()
                        engine = None
                        break
        finally:
            if engine is not None:
                engine.close()
        return schedule


def _distance(mine: list[float], theirs: list[float]) -> float:
    return statistics.fmean(abs(a - b) for a, b in zip(mine, theirs, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", default=None, help="any text; drawn and printed if left out")
    parser.add_argument("--exact", action="store_true", help="ask for equal log-probabilities where replay is off")
    parser.add_argument("--replay", type=Path, nargs="+", help="saved schedules to run instead")
    arguments = parser.parse_args()
    if not (MODEL / "model.safetensors").exists():
        parser.error(f"{MODEL} has no weights; run scripts/make_tiny_checkpoint.py {MODEL}")
    seed = arguments.seed or str(random.SystemRandom().randrange(1 << 30))
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as logs:
        fuzzer = Fuzzer(exact=arguments.exact, logs=Path(logs))
        if arguments.replay:
            for path in arguments.replay:
                problems += fuzzer.replay(Schedule.load(path))
        else:
            print(f"seed {seed}, {arguments.minutes} minutes", flush=True)
            problems = fuzzer.run(arguments.minutes, seed)
    print(f"seed {seed}: {fuzzer.tally}")
    for problem in problems:
        print(f"MISMATCH {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
