"""A real `sglang.Engine` in a process of its own: the host kills the whole process tree when its scheduler dies.

`EngineProcess(config, log)` starts one; `run(schedule)` plays a schedule and `alone(...)` runs one request by itself on
an empty cache. The engine serves csa2 on the CPU, with the pool's invariants checked where the config says so.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from answers import below_the_best, forced_question, plain_question, question
from books import decode_rows, settled
from fuzz_schedule import EngineConfig, Request, Schedule

MODEL = Path(__file__).parents[1] / "configs" / "tiny-dsv41"
START_SECONDS, CALL_SECONDS, CLOSE_SECONDS = 300, 600, 10
COUNTS = ("kv_used_tokens", "swa_used_tokens", "num_running_reqs")


class EngineDied(RuntimeError):
    """The engine's process ended, or did not answer in time."""


@dataclass
class Answer:
    """A request's end. chosen: log-probability of each token; top: per step the TOP best, as (value, token)."""

    finish: str = ""
    ids: list[int] = field(default_factory=list)
    chosen: list[float] = field(default_factory=list)
    top: list[list[tuple[float, int]]] = field(default_factory=list)
    cached: int = 0
    retractions: int = 0

    @property
    def margins(self) -> list[float]:
        return [step[0][0] - step[1][0] for step in self.top]

    def first(self, count: int) -> Answer:
        """The answer after that many tokens."""
        return replace(self, ids=self.ids[:count], chosen=self.chosen[:count], top=self.top[:count])


class EngineProcess:
    def __init__(self, config: EngineConfig, log_path: Path):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.log_path = log_path
        self._process = context.Process(target=_serve, args=(theirs, config, str(log_path)))
        self._process.start()
        theirs.close()
        try:
            self._receive(START_SECONDS)
        except BaseException:
            self.close()
            raise

    def run(self, schedule: Schedule) -> list[Answer]:
        return self._call("run", schedule)

    def alone(self, input_ids: list[int], new_tokens: int) -> Answer:
        return self._call("alone", input_ids, new_tokens)

    def forced(self, input_ids: list[int], start: int) -> list[tuple[float, float]]:
        """Of each token from `start` on, given all before it: its log-probability, and how far it is below the best."""
        return self._call("forced", input_ids, start)

    def counts(self) -> dict[str, float]:
        """What the pools hold besides a request of one token."""
        return self._call("counts")

    def decode_rows(self) -> int:
        """Rows of all decode batches so far."""
        return sum(decode_rows(self.log_path.read_text(errors="replace")))

    def close(self) -> None:
        if self._process.pid is not None and self._process.is_alive():
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join()

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            self._pipe.send((name, arguments))
        except OSError as error:
            raise self._death("is gone") from error
        return self._receive(CALL_SECONDS)

    def _receive(self, seconds: float) -> Any:
        try:
            if not self._pipe.poll(seconds):
                raise self._death(f"gave no answer in {seconds:.0f} s")
            kind, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._death("ended") from error
        if kind == "error":
            raise RuntimeError(f"in the engine's process: {value}")
        return value

    def check_errors(self) -> list[str]:
        """What the pool's checks have said so far."""
        return check_errors(self.log_path.read_text(errors="replace")) if self.log_path.exists() else []

    def _death(self, what: str) -> EngineDied:
        # Until it is dead the log may lack the reason.
        self._process.join(CLOSE_SECONDS)
        tail = self.log_path.read_text(errors="replace")[-3000:] if self.log_path.exists() else ""
        reason = "".join(f", {error}" for error in self.check_errors()[:1])
        return EngineDied(f"the engine {what}{reason}; the end of its log:\n{tail}")


def check_errors(log: str) -> list[str]:
    """The lines of a log that a violated invariant leaves."""
    return list(dict.fromkeys(re.findall(r"CheckError: .*", log)))


def _serve(pipe, config: EngineConfig, log_path: str) -> None:
    """The engine's process: its own session, so that it can be stopped with all it started."""
    os.setsid()
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["SGLANG_CSA2_CHECK"] = str(int(config.check))
    if config.retract_every:
        os.environ |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": str(config.retract_every)}
    import sglang

    engine = sglang.Engine(
        model_path=str(MODEL),
        device="cpu",
        attention_backend="csa2",
        skip_tokenizer_init=True,
        enable_metrics=True,
        log_level="info",
        max_running_requests=6,
        context_length=2048,
        max_total_tokens=config.max_total_tokens,
        chunked_prefill_size=config.chunked_prefill_size,
        enable_mixed_chunk=config.mixed_chunk,
        disable_radix_cache=not config.radix_cache,
        disable_overlap_schedule=not config.overlap,
        enable_decoder_swa_bounded_replay=config.replay,
        schedule_conservativeness=0.1,
        # Every decode batch is in the log.
        decode_log_interval=1,
    )
    # The host mixes no prefill into a decode batch of which a request asks for log-probabilities.
    player = Player(engine, measured=not config.mixed_chunk)
    pipe.send(("ready", None))
    while True:
        name, arguments = pipe.recv()
        try:
            pipe.send(("value", getattr(player, name)(*arguments)))
        except Exception as error:
            pipe.send(("error", f"{type(error).__name__}: {error}"))


class Player:
    """Plays schedules on an engine, inside its process; measured: the schedules' requests ask for log-probabilities."""

    def __init__(self, engine, *, measured: bool):
        self.engine, self.measured = engine, measured
        self._serial = 0

    def alone(self, input_ids: list[int], new_tokens: int) -> Answer:
        self._flush()
        return self._wait(self._generate(input_ids, new_tokens))

    def forced(self, input_ids: list[int], start: int) -> list[tuple[float, float]]:
        self._flush()
        ids = input_ids[start:]
        answer = self._wait(self.engine.async_generate(**forced_question(input_ids[:start], ids)))
        meta = answer["meta_info"]
        values = [entry[0] for entry in meta["input_token_logprobs"][-len(ids) :]]
        return list(zip(values, below_the_best(answer, ids), strict=True))

    def run(self, schedule: Schedule) -> list[Answer]:
        self._flush()
        return self._wait(self._play(schedule))

    def counts(self) -> dict[str, float]:
        from prometheus_client import CollectorRegistry, multiprocess

        def read() -> dict[str, float]:
            # Twice: the first's books are written by the second's prefill.
            for _ in range(2):
                self._wait(self._generate([5, 6, 7], 1))
            registry = CollectorRegistry()
            multiprocess.MultiProcessCollector(registry)
            samples = {s.name: s.value for metric in registry.collect() for s in metric.samples}
            return {name: samples[f"sglang:{name}"] for name in COUNTS}

        return settled(read)

    def _wait(self, work) -> Any:
        return self.engine.loop.run_until_complete(work)

    def _flush(self) -> None:
        """Empty the cache; the host refuses while the last request is still on its books."""
        for _ in range(100):
            if self.engine.flush_cache().success:
                return
            self._wait(asyncio.sleep(0.1))
        raise RuntimeError("the cache could not be flushed in 10 s: requests are still on the scheduler's books")

    async def _play(self, schedule: Schedule) -> list[Answer]:
        self._seen, self._running = 0, 0
        self._moved = asyncio.Condition()
        return list(await asyncio.gather(*[self._request(request) for request in schedule.requests]))

    async def _request(self, request: Request) -> Answer:
        async with self._moved:
            await self._moved.wait_for(lambda: self._seen >= request.arrives_after or not self._running)
            self._running += 1
        try:
            return await self._generate(request.input_ids, request.new_tokens, request, self._saw)
        finally:
            async with self._moved:
                self._running -= 1
                self._moved.notify_all()

    async def _saw(self, count: int) -> None:
        async with self._moved:
            self._seen += count
            self._moved.notify_all()

    async def _generate(
        self, input_ids: list[int], new_tokens: int, request: Request | None = None, saw: Callable | None = None
    ) -> Answer:
        asks = question if request is None or self.measured else plain_question
        self._serial += 1
        rid, timer = f"fuzz-{self._serial}", None
        abort = self.engine.tokenizer_manager.abort_request
        if request is not None and request.abort_delay is not None:
            timer = asyncio.get_running_loop().call_later(request.abort_delay, abort, rid)
        stream = await self.engine.async_generate(**asks(input_ids, new_tokens), stream=True, rid=rid)
        answer = Answer(finish="abort")
        try:
            async for chunk in stream:
                new = len(chunk["output_ids"]) - len(answer.ids)
                answer = _answer(chunk, answer)
                if saw is not None and new > 0:
                    await saw(new)
                if request is not None and request.abort_after is not None and len(answer.ids) >= request.abort_after:
                    abort(rid)
        except ValueError:
            # How the host tells an abort before the first token.
            return replace(answer, finish="abort")
        finally:
            if timer is not None:
                timer.cancel()
        return answer


def _answer(chunk: dict[str, Any], before: Answer) -> Answer:
    """What a stream has said so far; the message of an abort may bear less than the one before it."""
    meta = chunk["meta_info"]
    chosen = [entry[0] for entry in meta.get("output_token_logprobs") or []]
    top = [[(value, token) for value, token, _ in step] for step in meta.get("output_top_logprobs") or []]
    return Answer(
        finish=meta["finish_reason"]["type"] if meta["finish_reason"] else "",
        ids=max(list(chunk["output_ids"]), before.ids, key=len),
        chosen=max(chosen, before.chosen, key=len),
        top=max(top, before.top, key=len),
        cached=max(meta.get("cached_tokens", 0), before.cached),
        retractions=max(meta.get("num_retractions", 0) or 0, before.retractions),
    )
