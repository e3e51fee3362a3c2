"""What the fuzzer runs: schedules of requests against one engine, drawn from a seed, written as JSON, made smaller.

Arrivals and aborts are counted in tokens, not in seconds, so that a schedule means the same on any machine: a request
arrives once `arrives_after` tokens of the whole schedule have been seen, or nothing is running; it is aborted after
`abort_after` of its own tokens, or `abort_delay` seconds after its arrival if that comes first.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

VOCABULARY = range(3, 1024)
# Both sides of what the model and the host count in: pairs, candidate blocks, windows, pages, pools of 128 entries.
EDGES = [1, 2, 3, 4, 7, 8, 9, 63, 64, 65, 127, 128, 129, 130, 131, 254, 255, 256, 257, 258, 259]
# Tokens of a pool in which a few requests want for room.
SMALL_POOL = 2048
LONG = [300, 385, 511, 512, 513, 514, 600, 1025, 1100]
# Prompts that end just before a page does, so that each request soon wants a second one.
ALMOST_A_PAGE = range(250, 257)


@dataclass(frozen=True)
class EngineConfig:
    """How an engine is started.

    retract_every: the host's own test mode retracts at every such forward; 0: never. check: every forward checks the
    pool's invariants (SGLANG_CSA2_CHECK), and a violation ends the engine.
    """

    chunked_prefill_size: int = 256
    mixed_chunk: bool = False
    radix_cache: bool = True
    overlap: bool = True
    replay: bool = False
    max_total_tokens: int = 8192
    retract_every: int = 0
    check: bool = False

    @classmethod
    def draw(
        cls, rng: random.Random, *, replay: bool, check: bool = False, mixed: bool = False, small: bool = False
    ) -> EngineConfig:
        """The rest is drawn. small: a pool in which requests are retracted for want of room."""
        # With chunks of a page the host mixes nothing: it runs requests one by one.
        return cls(
            chunked_prefill_size=rng.choice([512, 512, 1024] if mixed and not replay else [256, 256, 512, 1024]),
            mixed_chunk=mixed and not replay,
            radix_cache=rng.random() < 0.8,
            overlap=rng.random() < 0.7,
            replay=replay,
            max_total_tokens=SMALL_POOL if small else 8192,
            retract_every=rng.choice([0, 0, 0, 3, 7]),
            check=check,
        )


@dataclass(frozen=True)
class Request:
    """Prompt: `shared` tokens of the prefix with that seed, then `own` tokens of its own seed."""

    prefix_seed: int
    shared: int
    own_seed: int
    own: int
    new_tokens: int
    arrives_after: int = 0
    abort_after: int | None = None
    abort_delay: float | None = None

    @property
    def input_ids(self) -> list[int]:
        return _tokens(self.prefix_seed, self.shared) + _tokens(self.own_seed, self.own)

    @property
    def aborts(self) -> bool:
        return self.abort_after is not None or self.abort_delay is not None


@dataclass(frozen=True)
class Schedule:
    """shows: what a replay of it must have met, by the names of the fuzzer's tally; for schedules made by hand."""

    seed: str
    engine: EngineConfig
    requests: tuple[Request, ...]
    note: str = field(default="", compare=False)
    shows: tuple[str, ...] = ()

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Schedule:
        raw = json.loads(path.read_text())
        requests = tuple(Request(**request) for request in raw["requests"])
        engine, shows = EngineConfig(**raw["engine"]), tuple(raw.get("shows", ()))
        return cls(raw["seed"], engine, requests, raw.get("note", ""), shows)


def draw_schedule(seed: str, engine: EngineConfig) -> Schedule:
    """A crowd that a small pool cannot hold, a family on one cached prefix, or requests of all kinds."""
    rng = random.Random(seed)
    prefixes = [rng.randrange(1 << 30) for _ in range(2)]
    if engine.max_total_tokens <= SMALL_POOL and rng.random() < 0.4:
        requests = [_draw_crowded(rng, prefixes) for _ in range(rng.randint(5, 6))]
    elif engine.radix_cache and rng.random() < 0.4:
        requests = [_draw_relative(rng, prefixes[0], first=n == 0) for n in range(rng.randint(2, 5))]
    else:
        requests = [_draw_request(rng, prefixes) for _ in range(rng.randint(2, 7))]
    if rng.random() < 0.3:
        # The very same prompt again, once the first may have been cached.
        requests.append(replace(rng.choice(requests), arrives_after=rng.randint(0, 60), abort_after=None))
    rng.shuffle(requests)
    return Schedule(seed, engine, tuple(requests))


def _draw_crowded(rng: random.Random, prefixes: list[int]) -> Request:
    plain = _draw_request(rng, prefixes)
    return replace(plain, shared=0, own=rng.choice(ALMOST_A_PAGE), new_tokens=rng.choice([8, 10]), arrives_after=0)


def _draw_relative(rng: random.Random, prefix: int, *, first: bool) -> Request:
    """One of several on whole pages of a prefix, the later ones after the first may have been cached."""
    plain = _draw_request(rng, [prefix])
    arrives_after = 0 if first else rng.randint(1, 30)
    return replace(plain, shared=rng.choice([256, 512]), own=rng.choice(EDGES), arrives_after=arrives_after)


def _draw_request(rng: random.Random, prefixes: list[int]) -> Request:
    shared = rng.choice([0, 0, 0, 1, 127, 128, 129, 255, 256, 257, 512])
    own = rng.choice(EDGES) if rng.random() < 0.85 or shared > 256 else rng.choice(LONG)
    new_tokens = rng.choice([1, 2, 3, 8, 8, 12, 20])
    abort_after, abort_delay = None, None
    if rng.random() < 0.2:
        if rng.random() < 0.5:
            abort_after = rng.randint(1, new_tokens)
        else:
            abort_delay = round(rng.uniform(0, 1.5), 2)
    return Request(
        prefix_seed=rng.choice(prefixes),
        shared=shared,
        own_seed=rng.randrange(1 << 30),
        own=own,
        new_tokens=new_tokens,
        arrives_after=rng.choice([0, 0, 0, rng.randint(1, 60)]),
        abort_after=abort_after,
        abort_delay=abort_delay,
    )


def smaller(schedule: Schedule) -> Iterator[Schedule]:
    """Schedules one step smaller: a request less, then shorter prompts and answers, then plainer events."""
    requests = schedule.requests
    for index in range(len(requests)):
        if len(requests) > 1:
            yield replace(schedule, requests=requests[:index] + requests[index + 1 :])
    for index, request in enumerate(requests):
        for change in _plainer(request):
            yield replace(schedule, requests=(*requests[:index], change, *requests[index + 1 :]))


def _plainer(request: Request) -> Iterator[Request]:
    if request.own > 1:
        yield replace(request, own=request.own // 2)
    if request.shared:
        yield replace(request, shared=request.shared // 2)
    if request.new_tokens > 1:
        yield replace(request, new_tokens=request.new_tokens // 2)
    if request.arrives_after:
        yield replace(request, arrives_after=0)


def _tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(VOCABULARY, k=count)
