"""Differential fuzzing: random schedules against a real SGLang engine, each request against itself run alone.

    python scripts/fuzz.py --minutes 60 [--seed 7] [--exact]       draw and run; exit status 1 on a mismatch
    python scripts/fuzz.py --replay tests/conformance/schedules/*.json     run saved schedules

A request that ends must give the tokens that it gives alone, up to one at which the best two log-probabilities lie
within 0.3; its log-probabilities stay within the golden bounds of the ones alone, or, where the tokens have parted, of
the ones forced along its own tokens, each of which is within 0.3 of the best there. Of the twenty best tokens after the
prompt at least fifteen are the ones alone. A request that is aborted is held to the same with what it gave before.
After each engine's schedules the pools hold what they held before. Half of the engines check the pool's invariants in
every forward. Half mix prefill chunks into decode batches; their requests ask for no log-probabilities, because the
host mixes none that do. Every fourth engine runs decoder SWA bounded replay, which is approximate by design: there only
log-probabilities are compared, with a wider bound. `--exact` asks for equal log-probabilities wherever replay is off.

A failing schedule is made smaller for a while and saved as JSON under tests/conformance/schedules/.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from answers import CASE_BOUND, MARGIN, TOP
from books import mixed_rows
from fuzz_engine import MODEL, Answer, EngineProcess
from fuzz_schedule import SMALL_POOL, EngineConfig, Request, Schedule, draw_schedule, smaller

SAVED = Path(__file__).parents[1] / "tests" / "conformance" / "schedules"
# tests/golden/README.md; the last is how far bounded replay may move a request's log-probabilities.
MEAN_BOUND, REPLAY_BOUND = 0.06, 0.5
# Of the TOP best tokens after a prompt.
LEAST_COMMON = 15
SCHEDULES_PER_ENGINE = 3
# With less time left than this an engine goes on: another one would be stopped soon after its start.
WORTH_A_START = 45
SHRINK_SECONDS = 300


@dataclass
class Tally:
    """What a run has seen. engines: by what they were started with; prompts: by what happened to them."""

    schedules: int = 0
    engines: Counter = field(default_factory=Counter)
    compared: int = 0
    equal: int = 0
    equal_tokens: int = 0
    mixed: int = 0
    forced: int = 0
    aborted: int = 0
    aborted_compared: int = 0
    prompts: Counter = field(default_factory=Counter)
    tokens: int = 0
    least_common: int = TOP
    differences: list[float] = field(default_factory=list)
    replay_differences: list[float] = field(default_factory=list)

    def start(self, config: EngineConfig) -> None:
        self.engines["all"] += 1
        self.engines[f"chunks of {config.chunked_prefill_size}"] += 1
        self.engines["checks"] += config.check
        self.engines["mixed chunks"] += config.mixed_chunk
        self.engines["bounded replay"] += config.replay
        self.engines["a small pool"] += config.max_total_tokens <= SMALL_POOL
        self.engines["a prefix cache"] += config.radix_cache

    def see(self, config: EngineConfig, prompt: list[int], answer: Answer) -> None:
        self.compared += 1
        self.tokens += len(answer.ids)
        self.prompts["retracted"] += answer.retractions > 0
        self.prompts["retracted for want of room"] += answer.retractions > 0 and not config.retract_every
        self.prompts["on cached prefixes"] += answer.cached > 0
        self.prompts["in chunks"] += len(prompt) - answer.cached > config.chunked_prefill_size

    def __str__(self) -> str:
        mean = statistics.fmean(self.differences) if self.differences else 0.0
        replay = max(self.replay_differences, default=0.0)
        engines = ", ".join(f"{count} with {what}" for what, count in sorted(self.engines.items()) if what != "all")
        prompts = "".join(f", {count} {what}" for what, count in sorted(self.prompts.items()))
        requests = (
            f"{self.compared} requests compared ({self.equal} equal to the last bit, {self.equal_tokens} token for "
            f"token without log-probabilities, {self.forced} forced{prompts}), {self.aborted} aborted "
            f"({self.aborted_compared} of those compared), {self.tokens} tokens, {self.mixed} decoded in prefills"
        )
        return (
            f"{self.schedules} schedules on {self.engines['all']} engines ({engines}): {requests}; difference without "
            f"replay mean {mean:.4f} max {max(self.differences, default=0.0):.4f}, with replay max {replay:.4f}; at "
            f"least {self.least_common} of the {TOP} best tokens in common"
        )


class Fuzzer:
    def __init__(self, *, exact: bool, logs: Path):
        self.exact, self.logs, self.tally = exact, logs, Tally()

    def engine(self, config: EngineConfig) -> EngineProcess:
        self.tally.start(config)
        return EngineProcess(config, self.logs / f"engine-{self.tally.engines['all']}.log")

    def check(self, engine: EngineProcess, schedule: Schedule) -> list[str]:
        """Play a schedule; the mismatches, each in a sentence."""
        before = engine.decode_rows()
        answers = engine.run(schedule)
        self.tally.schedules += 1
        self._count_mixed(schedule, answers, engine.decode_rows() - before)
        problems = []
        for index, (request, answer) in enumerate(zip(schedule.requests, answers, strict=True)):
            if problem := self._answered(engine, schedule.engine, request, answer):
                problems.append(f"request {index} ({len(request.input_ids)} tokens): {problem}")
        return problems

    def _count_mixed(self, schedule: Schedule, answers: list[Answer], decoded: int) -> None:
        """Tokens that came neither from a decode batch nor from their request's own prefill."""
        if schedule.engine.mixed_chunk and not any(answer.finish == "abort" for answer in answers):
            counts = [(len(answer.ids), answer.retractions) for answer in answers]
            self.tally.mixed += max(0, mixed_rows(counts, decoded))

    def _answered(self, engine, config: EngineConfig, request: Request, answer: Answer) -> str | None:
        """What is wrong with a request's end or with what it gave, or None."""
        count, aborted = len(answer.ids), answer.finish == "abort" and request.aborts
        if aborted:
            self.tally.aborted += 1
            if not answer.ids:
                return None
            self.tally.aborted_compared += 1
        elif not _is_whole(answer, request.new_tokens, measured=not config.mixed_chunk):
            return f"ended as {answer.finish!r} after {count} tokens with {len(answer.chosen)} log-probabilities"
        if count > request.new_tokens:
            return f"gave {count} tokens and was asked for {request.new_tokens}"
        alone = engine.alone(request.input_ids, request.new_tokens)
        if not _is_whole(alone, request.new_tokens, measured=True):
            return f"alone it ended as {alone.finish!r} after {len(alone.ids)} tokens"
        self.tally.see(config, request.input_ids, answer)
        return self._judge(engine, config, request.input_ids, answer, alone.first(count))

    def _judge(self, engine, config: EngineConfig, prompt: list[int], answer: Answer, alone: Answer) -> str | None:
        tally, replay = self.tally, config.replay
        same = next((i for i, (a, b) in enumerate(zip(answer.ids, alone.ids, strict=True)) if a != b), len(answer.ids))
        wanted = alone.chosen
        if same < len(answer.ids):
            # What comes before is equal, so that both mean the same margin.
            if not replay and not alone.margins[same] <= MARGIN:
                return (
                    f"token {same} is {answer.ids[same]}, alone {alone.ids[same]}, at a margin of {alone.margins[same]}"
                )
            tally.forced += 1
            forced = engine.forced(prompt + answer.ids, len(prompt))
            wanted = [value for value, _ in forced]
            for step, (_, below) in enumerate(forced):
                if not replay and not below <= MARGIN:
                    return f"token {step}, {answer.ids[step]}, is {below:.3f} below the best of a forced run"
        # An abort may come before the log-probabilities of its last tokens.
        distances = [_distance(answer.chosen, wanted[: len(answer.chosen)])] if answer.chosen else []
        if answer.top:
            # The twenty best after the prompt, as the golden values have them: the same prompt whatever came after.
            first = {token: value for value, token in alone.top[0]}
            both = [(value, first[token]) for value, token in answer.top[0] if token in first]
            tally.least_common = min(tally.least_common, len(both))
            if len(both) < LEAST_COMMON:
                return f"only {len(both)} of the {TOP} best tokens after the prompt are the ones alone"
            distances.append(statistics.fmean(abs(a - b) for a, b in both))
        tops = alone.top[: len(answer.top)]
        if config.mixed_chunk:
            tally.equal_tokens += answer.ids == alone.ids
        else:
            tally.equal += answer.ids == alone.ids and answer.top == tops
        if distances:
            (tally.replay_differences if replay else tally.differences).append(max(distances))
        bound = REPLAY_BOUND if replay else CASE_BOUND
        for distance in distances:
            # NaN is within no bound.
            if not distance <= bound:
                return f"log-probabilities differ by {distance:.3f} on average, more than {bound}"
        if self.exact and not replay and answer.top and answer.top != tops:
            return f"log-probabilities are not equal (difference {max(distances):.6f})"
        return None

    def run(self, minutes: float, seed: str) -> list[str]:
        """Fuzz until the time is up or something fails; the first engine's start does not count."""
        deadline = None
        rng = random.Random(seed)
        while deadline is None or time.monotonic() < deadline:
            config = EngineConfig.draw(rng, **kind(self.tally.engines["all"]))
            engine = None
            try:
                engine = self.engine(config)
                baseline = engine.counts()
                deadline = deadline or time.monotonic() + minutes * 60
                for played in itertools.count():
                    if is_enough(played, deadline - time.monotonic()):
                        break
                    schedule = draw_schedule(f"{seed}/{rng.randrange(1 << 30)}", config)
                    if problems := self._attempt(engine, schedule):
                        return self._fail(schedule, problems)
                if problems := self._left(engine, baseline):
                    return [f"engine {config}: {problem}" for problem in problems]
            except RuntimeError as error:
                return [f"engine {config}: {error}"]
            finally:
                if engine is not None:
                    engine.close()
            print(f"seed {seed}: {self.tally}", flush=True)
        if self.tally.differences and statistics.fmean(self.tally.differences) > MEAN_BOUND:
            return [f"the mean difference over all requests is above {MEAN_BOUND}: {self.tally}"]
        return []

    def replay(self, schedule: Schedule) -> list[str]:
        """A saved schedule on an engine of its own, and what it leaves."""
        engine = self.engine(schedule.engine)
        try:
            baseline = engine.counts()
            return self._attempt(engine, schedule) or self._left(engine, baseline) or self._unseen(schedule)
        except RuntimeError as error:
            return [str(error)]
        finally:
            engine.close()

    def _unseen(self, schedule: Schedule) -> list[str]:
        """What a saved schedule was to meet and has not."""
        met = self.tally.prompts | {"aborted": self.tally.aborted, "mixed": self.tally.mixed}
        return [f"the schedule is to meet {what!r} and has not: {met}" for what in schedule.shows if not met.get(what)]

    def _left(self, engine: EngineProcess, baseline: dict[str, float]) -> list[str]:
        """What is wrong with an engine after its schedules: the pools' books, and what the checks have said."""
        books, said = engine.counts(), engine.check_errors()
        return [f"the pools' books are {books}, before {baseline}"] * (books != baseline) + said

    def _attempt(self, engine: EngineProcess, schedule: Schedule) -> list[str]:
        try:
            return self.check(engine, schedule)
        except RuntimeError as error:
            # EngineDied is one.
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


def kind(number: int) -> dict[str, bool]:
    """What the engine of that number, from 0, is whatever is drawn, so that a few engines are of every kind.

    Every second is checked; that shifts by one with every four, so that replay is met with checks and without. The
    first is checked and asks for log-probabilities, so that the shortest run compares them.
    """
    check, mixed = (number + number // 4) % 2 == 0, number % 4 in (1, 2)
    return {"replay": number % 4 == 3, "check": check, "mixed": mixed, "small": number % 3 == 0}


def is_enough(played: int, seconds_left: float) -> bool:
    """Whether an engine has played its schedules, or the run's time is up."""
    return seconds_left < 0 or (played >= SCHEDULES_PER_ENGINE and seconds_left > WORTH_A_START)


def _is_whole(answer: Answer, count: int, *, measured: bool) -> bool:
    """Whether an answer ended at its length, with log-probabilities for every token, or for none if not measured."""
    logprobs = {len(answer.chosen), len(answer.top)}
    return answer.finish == "length" and len(answer.ids) == count and logprobs == {count if measured else 0}


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
