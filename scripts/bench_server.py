"""Serve V4.1-Flash's attention geometry with random weights and time it: csa2, or the host's own backend, alike.

    python scripts/bench_server.py --backend csa2 8192x1 8192x8 131072x8 [--model DIR] [--json FILE] [-- server options]

Per CONTEXTxBATCH: TTFT is from sending the batch to the last of its first tokens; TPOT is the mean gap between tokens
from there on, when all decode. Prompts are random and not cached. What the log says about memory is printed first.
"""

from __future__ import annotations

import argparse
import json
import random
import re
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", help="CONTEXTxBATCH")
    parser.add_argument("--backend", default="csa2")
    parser.add_argument("--model", type=Path, default=GEOMETRY)
    parser.add_argument("--tokens", type=int, default=65, help="tokens per request")
    parser.add_argument("--json", type=Path)
    mine, server_options = sys.argv[1:], []
    if "--" in mine:
        at = mine.index("--")
        mine, server_options = mine[:at], mine[at + 1 :]
    options = parser.parse_args(mine)
    sizes = [tuple(map(int, size.split("x"))) for size in options.sizes]
    random.seed(0)
    arguments = [*OPTIONS, *server_options]
    with served.serve(*arguments, model=options.model, device="cuda", backend=options.backend, sizes=[]) as server:
        result = {"backend": options.backend, **memory(server.log), "sizes": {}}
        print({name: value for name, value in result.items() if name != "sizes"}, flush=True)
        if sizes:
            measure(server.url, 1024, max(batch for _, batch in sizes), 16)
        for context, batch in sizes:
            result["sizes"][f"{context}x{batch}"] = figures = measure(server.url, context, batch, options.tokens)
            print(f"{context} x {batch}: TTFT {figures['ttft_s']:.3f} s, TPOT {figures['tpot_ms']:.2f} ms", flush=True)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
