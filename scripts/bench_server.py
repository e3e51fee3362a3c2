"""Serve V4.1-Flash's attention geometry with random weights and time it: csa2, or the host's own backend, alike.

    python scripts/bench_server.py 8192x1 8192x8 131072x8 [--server csa2] [--model DIR] [--json FILE] [-- options]
    python scripts/bench_server.py 8192x1 131072x1 --server csa2 --server "dsv4 8192x1 --random-seed 7" -- ...

Per CONTEXTxBATCH: TTFT is from sending the batch to the last of its first tokens; TPOT is the mean gap between tokens
from there on, when all decode. Prompts are random and not cached. What the log says about memory is printed first.

`--server` names a backend and may add options and, in the place of the common sizes, sizes of its own. Several servers
start together on one card, each size is measured on one after another of them while the rest wait, and they need
`--max-total-tokens` among their options: each sizes its pool by what the card has free at that moment.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import shlex
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import requests

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY / "tests"))
import served  # noqa: E402

GEOMETRY = REPOSITORY / "configs" / "flash-geometry"
OPTIONS = ["--load-format", "dummy", "--skip-tokenizer-init", "--disable-radix-cache"]


def stream(url: str, prompt: list[int], tokens: int) -> list[float]:
    """Arrival times of a request's tokens."""
    body = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
        "stream": True,
    }
    times: list[float] = []
    with requests.post(url + "/generate", json=body, stream=True, timeout=900) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
    return times


def measure(url: str, context: int, batch: int, tokens: int) -> dict[str, float]:
    prompts = [random.choices(range(3, 1000), k=context - tokens) for _ in range(batch)]
    start = time.perf_counter()
    with ThreadPoolExecutor(batch) as executor:
        arrivals = list(executor.map(lambda prompt: stream(url, prompt, tokens), prompts))
    ready = max(times[0] for times in arrivals)
    later = [[t for t in times if t >= ready] for times in arrivals]
    gaps = [(times[-1] - times[0]) / (len(times) - 1) for times in later if len(times) > 8]
    return {"ttft_s": ready - start, "tpot_ms": 1e3 * sum(gaps) / len(gaps)}


def memory(log: str) -> dict[str, float]:
    """What the server's log says; `available_bytes` is in GiB, as `python -m sglang_csa2 plan --kv-gib` takes it."""
    found = {}
    for name in ("bytes_per_full_token", "available_bytes", "max_total_num_tokens"):
        match = re.search(rf"{name}=([\d.]+)", log)
        found[name] = float(match.group(1)) if match else float("nan")
    return found


def size_of(word: str) -> tuple[int, int]:
    context, batch = word.split("x")
    return int(context), int(batch)


class Bench:
    """A backend, its further options and the sizes that are measured on it; then its server."""

    def __init__(self, words: str, sizes: list[str]):
        self.backend, *rest = shlex.split(words)
        own = [word for word in rest if re.fullmatch(r"\d+x\d+", word)]
        self.options = [word for word in rest if word not in own]
        self.name = " ".join([self.backend, *self.options])
        self.sizes = own or sizes
        self.server: served.Server | None = None
        self.figures: dict[str, dict[str, float]] = {}

    def start(self, stack: contextlib.ExitStack, arguments: list[str], model: Path) -> None:
        options = {"model": model, "device": "cuda", "backend": self.backend, "sizes": []}
        self.server = stack.enter_context(served.serve(*arguments, *self.options, **options))

    def measure(self, size: str, tokens: int) -> None:
        self.figures[size] = figures = measure(self.server.url, *size_of(size), tokens)
        print(f"{self.name}, {size}: TTFT {figures['ttft_s']:.3f} s, TPOT {figures['tpot_ms']:.2f} ms", flush=True)

    @property
    def result(self) -> dict:
        return {"backend": self.backend, "options": self.options, **memory(self.server.log), "sizes": self.figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", help="CONTEXTxBATCH")
    parser.add_argument("--server", action="append", help='"BACKEND [CONTEXTxBATCH ...] [options]"; csa2 by default')
    parser.add_argument("--model", type=Path, default=GEOMETRY)
    parser.add_argument("--tokens", type=int, default=65, help="tokens per request")
    parser.add_argument("--json", type=Path)
    mine, server_options = sys.argv[1:], []
    if "--" in mine:
        at = mine.index("--")
        mine, server_options = mine[:at], mine[at + 1 :]
    options = parser.parse_args(mine)
    random.seed(0)
    benches = [Bench(words, options.sizes) for words in options.server or ["csa2"]]
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(benches)) as executor:
        arguments = [*OPTIONS, *server_options]
        list(executor.map(lambda bench: bench.start(stack, arguments, options.model), benches))
        for bench in benches:
            print({name: value for name, value in bench.result.items() if name != "sizes"}, flush=True)
            if bench.sizes:
                measure(bench.server.url, 1024, max(size_of(size)[1] for size in bench.sizes), 16)
        # In turn per size, and as often as a size is named: the second time it is warm.
        rounds = max(len(bench.sizes) for bench in benches)
        for bench, size in ((b, b.sizes[i]) for i in range(rounds) for b in benches if i < len(b.sizes)):
            bench.measure(size, options.tokens)
        if options.json:
            options.json.write_text(json.dumps([bench.result for bench in benches], indent=1) + "\n")


if __name__ == "__main__":
    main()
