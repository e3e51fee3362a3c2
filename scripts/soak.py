"""Soak a running server: thousands of requests of mixed sizes, streams cut half-way, malformed requests.

    python scripts/soak.py http://127.0.0.1:30000 [--requests 2000] [--parallel 8] [--seed 1] [--vocabulary 1024]

The server runs with --enable-metrics, on this machine if its memory is to be compared. Before the soak every prompt
is answered alone, on an empty cache; during it they come in any order, at once, whole or as a stream, and some
streams are cut. By turns of BLOCK requests they ask for log-probabilities and do not, since the host mixes prefill
into decode batches only without. Afterwards a request finds as many tokens of the pools held as before (prefixes in
the cache are not held), as many are free on an empty cache, no request runs, the scheduler's memory has not grown by
more than a twentieth or 64 MiB where this machine runs one scheduler (otherwise the output says that it was not
compared), and every completed answer was the one before, by answers.py: equal tokens and log-probabilities within
0.12 on average, or apart at a margin of at most 0.3 and then compared through log-probabilities. Exit status 1
otherwise.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import requests
from answers import Tally, forced_question, judge, plain_question, question
from books import settled

BLOCK = 20
LENGTHS = [1, 2, 3, 5, 8, 9, 16, 31, 64, 65, 100, 127, 128, 129, 200, 255, 256, 257, 300]
# Read without a flush, which would clear a leak away, and after one.
HELD = ("kv_used_tokens", "swa_used_tokens", "num_running_reqs")
BOOKS = ("kv_available_tokens", "swa_available_tokens")
# csa2's own, which another backend's server does not have.
STAY_ZERO = ("csa2:refused_total", "csa2:fallen_back_total")
MALFORMED: list[tuple[str, str]] = [
    ("/generate", '{"input_ids": []}'),
    ("/generate", '{"input_ids": [5], "sampling_params": {"max_new_tokens": -1}}'),
    ("/generate", '{"input_ids": "none", "text": 5'),
    ("/generate", "{}"),
    ("/generate", '{"input_ids": [5], "sampling_params": {"temperature": "hot"}}'),
    ("/generate", '{"input_ids": [5], "sampling_params": {"top_p": 7}}'),
    ("/generate", json.dumps({"input_ids": [5] * 200_000})),
    ("/v1/chat/completions", '{"model": "tiny", "messages": "hello"}'),
    ("/v1/completions", '{"prompt": {"a": 1}}'),
    ("/no_such_path", "{}"),
]


class Soak:
    def __init__(self, url: str, *, seed: int, vocabulary: int):
        self.url, self.rng = url.rstrip("/"), random.Random(seed)
        shared = [self.rng.randrange(3, vocabulary) for _ in range(256)]
        self.prompts = []
        for index, length in enumerate(LENGTHS * 2):
            own = [self.rng.randrange(3, vocabulary) for _ in range(length)]
            # Some share a page, so that prefixes are hit, held and evicted.
            self.prompts.append((shared + own if index % 5 == 4 else own, 1 + index % 12))
        self.seen: Counter[str] = Counter()
        self.problems: list[str] = []
        self.wanted: list[dict] = []
        self.answered: list[tuple[int, bool, dict]] = []

    def body(self, index: int, measured: bool) -> dict:
        """With log-probabilities, or without."""
        return question(*self.prompts[index], self.wanted[index]) if measured else plain_question(*self.prompts[index])

    def ask(self, body: dict) -> dict:
        response = self.post("/generate", json.dumps(body))
        response.raise_for_status()
        return response.json()

    def post(self, path: str, data: str | None = None, **kwargs) -> requests.Response:
        headers = {"Content-Type": "application/json"}
        return requests.post(self.url + path, data=data, headers=headers, timeout=600, **kwargs)

    def flush(self) -> None:
        for _ in range(600):
            if self.post("/flush_cache").status_code == 200:
                return
            time.sleep(0.1)
        raise SystemExit("the cache could not be flushed in a minute: requests are still on the scheduler's books")

    def references(self) -> None:
        """Every prompt alone, on an empty cache, with log-probabilities."""
        self.wanted = []
        for prompt, new_tokens in self.prompts:
            self.flush()
            self.wanted.append(self.ask(question(prompt, new_tokens)))

    def books(self) -> dict[str, float]:
        """What is held besides a request of one token, and what is free after a flush."""
        held = self._settled(HELD)
        self.flush()
        return held | self._settled(BOOKS + STAY_ZERO)

    def _settled(self, names: tuple[str, ...]) -> dict[str, float]:
        """The endpoint's numbers once they stay as they are; without those of STAY_ZERO that it lacks."""

        def read() -> dict[str, float]:
            # Twice: the first's books are written by the second's prefill.
            for _ in range(2):
                self.post("/generate", json.dumps(plain_question([5, 6, 7], 1)))
            text = requests.get(self.url + "/metrics", timeout=60).text
            found = {name: _metric(text, name if name in STAY_ZERO else f"sglang:{name}") for name in names}
            if missing := [name for name, value in found.items() if value is None and name not in STAY_ZERO]:
                raise SystemExit(
                    f"{self.url}/metrics has no {', '.join(missing)}: start the server with --enable-metrics"
                )
            return {name: value for name, value in found.items() if value is not None}

        return settled(read)

    def one(self, kind: str, index: int, measured: bool) -> None:
        try:
            getattr(self, f"_{kind}")(index, measured)
        except (requests.RequestException, ValueError, KeyError) as error:
            self.problems.append(f"{kind} request {index}: {type(error).__name__}: {error}")
        self.seen[kind] += 1

    def _whole(self, index: int, measured: bool) -> None:
        self.answered.append((index, measured, self.ask(self.body(index, measured))))

    def _streamed(self, index: int, measured: bool) -> None:
        *_, last = self._stream(index, measured)
        self.answered.append((index, measured, last))

    def _cut(self, index: int, measured: bool) -> None:
        """Leave half-way through an answer of eight tokens more than the prompt's."""
        stream, answer = self._stream(index, measured, more=8), None
        for _ in range(max(1, self.prompts[index][1] // 2)):
            answer = next(stream, None)
            if answer is None:
                break
        stream.close()
        self.seen["cut before the end"] += answer is not None and answer["meta_info"]["finish_reason"] is None

    def _malformed(self, index: int, measured: bool) -> None:
        path, data = MALFORMED[index % len(MALFORMED)]
        status = self.post(path, data).status_code
        if not 400 <= status < 500:
            self.problems.append(f"malformed request {path} {data[:60]} got status {status}, not 4xx")

    def _stream(self, index: int, measured: bool, more: int = 0) -> Iterator[dict]:
        body = self.body(index, measured) | {"stream": True}
        body["sampling_params"]["max_new_tokens"] += more
        with self.post("/generate", json.dumps(body), stream=True) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])

    def compare(self) -> Tally:
        """Every completed answer so far against the one before; once the soak is over, for some need a run alone."""
        tally, kept = Tally(), {}

        def force(prompt: list[int], ids: list[int]) -> dict:
            key = *prompt, -1, *ids
            if key not in kept:
                self.flush()
                kept[key] = self.ask(forced_question(prompt, ids))
            return kept[key]

        for index, measured, answer in self.answered:
            try:
                found = judge(self.prompts[index][0], answer, self.wanted[index], force, measured=measured)
            except (requests.RequestException, LookupError, TypeError, ValueError) as error:
                self.problems.append(f"prompt {index} cannot be compared: {type(error).__name__}: {error}")
                continue
            tally.append(found)
            if found.problem:
                self.problems.append(f"prompt {index} against the answer before the soak: {found.problem}")
        if not tally.tokens:
            self.problems.append("no answer was compared")
        return tally

    def run(self, count: int, parallel: int) -> None:
        kinds = self.rng.choices(["whole", "streamed", "cut", "malformed"], weights=[5, 2, 2, 1], k=count)
        with ThreadPoolExecutor(parallel) as executor:
            jobs = [
                executor.submit(self.one, kind, self.rng.randrange(len(self.prompts)), turn // BLOCK % 2 == 0)
                for turn, kind in enumerate(kinds)
            ]
            for done, job in enumerate(jobs, start=1):
                job.result()
                if done % 250 == 0:
                    print(f"{done} requests, {len(self.problems)} problems", flush=True)


def _metric(text: str, name: str) -> float | None:
    found = re.search(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)", text, re.MULTILINE)
    return float(found.group(1)) if found else None


def scheduler_memory() -> int | None:
    """Resident bytes of this machine's scheduler process; None if there is not exactly one."""
    found = []
    for status in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if status.read_bytes().startswith(b"sglang::scheduler"):
                resident = re.search(r"^VmRSS:\s+(\d+)", (status.parent / "status").read_text(), re.MULTILINE)
                found.append(int(resident.group(1)) << 10 if resident else 0)
        except OSError:
            continue
    return found[0] if len(found) == 1 else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--vocabulary", type=int, default=1024, help="ids are drawn below it")
    arguments = parser.parse_args()
    start = time.monotonic()
    soak = Soak(arguments.url, seed=arguments.seed, vocabulary=arguments.vocabulary)
    try:
        print(counters(soak.books()))
    except requests.ConnectionError:
        raise SystemExit(f"no server answers at {arguments.url}: start one, with --enable-metrics") from None
    print(f"answering {len(soak.prompts)} prompts alone first", flush=True)
    soak.references()
    # As many as run at once, so that buffers have grown before memory is read.
    soak.run(4 * arguments.parallel, arguments.parallel)
    before, memory = soak.books(), scheduler_memory()
    soak.run(arguments.requests, arguments.parallel)
    after, memory_after = soak.books(), scheduler_memory()
    if after != before:
        soak.problems.append(f"the books are {after}, before the soak {before}")
    soak.problems += [f"{name} is {after[name]}, not 0" for name in STAY_ZERO if after.get(name)]
    if memory is None or memory_after is None:
        print("memory not compared: not exactly one scheduler process on this machine")
    else:
        print(f"scheduler memory {memory >> 20} MiB before, {memory_after >> 20} MiB after")
        if memory_after - memory > max(memory // 20, 64 << 20):
            soak.problems.append("the scheduler's memory has grown beyond the bound")
    print(soak.compare())
    for problem in soak.problems[:20]:
        print(f"PROBLEM {problem}")
    end = f"{len(soak.problems)} problems; {time.monotonic() - start:.0f} s"
    print(f"{dict(soak.seen)}; books {after}; {counters(after)}; {end}")
    return 1 if soak.problems else 0


def counters(books: dict[str, float]) -> str:
    """What is known of csa2's counters."""
    if missing := [name for name in STAY_ZERO if name not in books]:
        return f"NOT KNOWN: {', '.join(missing)}, which /metrics lacks (only a server of csa2 has them)"
    return f"{' and '.join(STAY_ZERO)} are {'all 0' if not any(books[name] for name in STAY_ZERO) else 'not all 0'}"


if __name__ == "__main__":
    sys.exit(main())
