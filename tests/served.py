"""Start a real server for a test and talk to it: on the CPU, or with CSA2_TEST_DEVICE=cuda on a GPU."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import answers
import requests
from books import decode_rows, mixed_rows, settled

REPOSITORY = Path(__file__).parents[1]
TINY = REPOSITORY / "configs" / "tiny-dsv41"
GOLDEN = REPOSITORY / "tests" / "golden" / "data"
DEVICE = os.environ.get("CSA2_TEST_DEVICE", "cpu")
# On a GPU the host's first start compiles for minutes.
START_SECONDS = {"cpu": 300, "cuda": 580}
# The bounds of the golden values (tests/golden/README.md), per case and over all.
CASE_BOUND, MEAN_BOUND, MARGIN = answers.CASE_BOUND, 0.06, answers.MARGIN
CASE_BOUND_64H, MEAN_BOUND_64H = 0.14, 0.08
# Small pools for a small machine; context for the longest golden prompt.
SIZES = ["--max-running-requests", "8", "--context-length", "4096", "--max-total-tokens", "16384"]
# Several servers may share the card; replay, the host's default on a GPU, is an approximation: tests ask for it.
GPU_OPTIONS = [
    *("--mem-fraction-static", "0.3", "--moe-runner-backend", "triton", "--cuda-graph-max-bs-decode", "8"),
    "--no-enable-decoder-swa-bounded-replay",
]  # fmt: skip


@dataclass
class Server:
    """A running server: its address and its log so far."""

    url: str
    log_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def post(self, path: str, body: dict | None = None, **kwargs) -> requests.Response:
        return requests.post(self.url + path, json=body or {}, timeout=300, **kwargs)

    def generate(self, input_ids: list[int], max_new_tokens: int = 8, **extra) -> dict:
        return self.answer(answers.plain_question(input_ids, max_new_tokens) | extra)

    def answer(self, body: dict) -> dict:
        response = self.post("/generate", body)
        response.raise_for_status()
        return response.json()

    def alone(self, input_ids: list[int], max_new_tokens: int = 8) -> dict:
        """The answer on an empty cache, with what others are compared by."""
        self.flush()
        answer = self.answer(answers.question(input_ids, max_new_tokens))
        assert answer["meta_info"]["cached_tokens"] == 0
        return answer

    def flush(self) -> None:
        """Empty the prefix cache, once the last request has been taken off the books."""
        deadline = time.monotonic() + 30
        while self.post("/flush_cache").status_code != 200:
            assert time.monotonic() < deadline, "the cache could not be flushed: requests are still running"
            time.sleep(0.2)

    def metrics(self) -> dict[str, float]:
        """Tokens held in the full and the SWA pool at the last batch, and requests running."""
        text = requests.get(self.url + "/metrics", timeout=60).text
        return {
            name: float(re.search(rf"^sglang:{name}{{[^}}]*}} (\S+)", text, re.MULTILINE).group(1))
            for name in ("kv_used_tokens", "swa_used_tokens", "num_running_reqs")
        }

    def baseline(self) -> dict[str, float]:
        """What the pools hold besides a request of one token: what is held beyond it later has leaked."""

        def read() -> dict[str, float]:
            # Twice: the first's books are written by the second's prefill.
            for _ in range(2):
                self.generate([5, 6, 7], 1)
            return self.metrics()

        return settled(read)


def environment(**extra: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "HF_HUB_OFFLINE": "1"} | extra


def server_options(
    port: int, *arguments: str, model: Path = TINY, device: str = DEVICE, backend: str = "csa2"
) -> list[str]:
    """Options of `launch_server`."""
    base = ["--attention-backend", backend, "--device", device, "--model-path", str(model), "--port", str(port)]
    return [*base, *(GPU_OPTIONS if device == "cuda" else []), *arguments]


def launch_arguments(port: int, *arguments: str, **where: Any) -> list[str]:
    """The command of a server; `where` as in `server_options`."""
    # Without the current folder on the path: the installed package is served.
    return [sys.executable, "-P", "-m", "sglang.launch_server", *server_options(port, *arguments, **where)]


@contextlib.contextmanager
def serve(
    *arguments: str,
    model: Path = TINY,
    env: dict[str, str] | None = None,
    device: str = DEVICE,
    backend: str = "csa2",
    sizes: list[str] = SIZES,
) -> Iterator[Server]:
    """A server with these arguments, ready; stopped with every process it started."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        log_path = Path(folder) / "server.log"
        command = launch_arguments(port, *sizes, *arguments, model=model, device=device, backend=backend)
        with log_path.open("w") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment(**(env or {})), start_new_session=True
            )
        server = Server(f"http://127.0.0.1:{port}", log_path)
        try:
            _wait(process, server, START_SECONDS[device])
            yield server
            assert process.poll() is None, "the server died:\n" + server.log[-4000:]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: subprocess.Popen, server: Server, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while "ready to roll" not in server.log:
        assert process.poll() is None, "the server did not start:\n" + server.log[-4000:]
        assert time.monotonic() < deadline, "the server is not ready:\n" + server.log[-4000:]
        time.sleep(0.5)


def assert_same_answers(
    server: Server, prompts: list[list[int]], found: list[dict], wanted: list[dict], *, measured: bool = True
) -> None:
    """Answers against those alone: tokens, and log-probabilities if they were asked for (scripts/answers.py)."""

    def force(prompt: list[int], ids: list[int]) -> dict:
        server.flush()
        return server.answer(answers.forced_question(prompt, ids))

    tally = answers.Tally()
    for prompt, answer, one in zip(prompts, found, wanted, strict=True):
        comparison = answers.judge(prompt, answer, one, force, measured=measured)
        assert comparison.problem is None, f"prompt of {len(prompt)} tokens: {comparison.problem}"
        tally.append(comparison)
    print(f"\n{tally}")
    assert tally.tokens > 0


def mixed_tokens(log: str, found: list[dict]) -> int:
    """The least number of tokens of these answers that were decoded in prefill batches, by the log meanwhile."""
    counts = [(len(answer["output_ids"]), answer["meta_info"]["num_retractions"]) for answer in found]
    return mixed_rows(counts, sum(decode_rows(log)))


def golden_cases(name: str) -> list[dict]:
    return json.loads((GOLDEN / name / "golden.json").read_text())["cases"]


def golden_differences(server: Server, name: str) -> tuple[list[float], list[int]]:
    """Per golden case the mean difference of its 20 log-probabilities, and its tokens from the prefix cache.

    Greedy tokens must agree up to a thin margin; along the golden tokens, whatever came before, each is the best where
    its margin is wide and within MARGIN of the best elsewhere.
    """
    differences, cached = [], []
    for case in golden_cases(name):
        answer = log_probabilities(server, case["input_ids"], case["top20_ids"], len(case["greedy_ids"]))
        pairs = zip(answer["logprobs"], case["top20_logprobs"], strict=True)
        differences.append(statistics.fmean(abs(mine - golden) for mine, golden in pairs))
        cached.append(answer["cached"])
        where = f"case of {len(case['input_ids'])} tokens"
        for mine, golden, margin in zip(answer["ids"], case["greedy_ids"], case["greedy_margins"], strict=True):
            if mine != golden:
                assert margin <= MARGIN, where
                break
        forced = server.answer(answers.forced_question(case["input_ids"], case["greedy_ids"]))
        for below, margin in zip(
            answers.below_the_best(forced, case["greedy_ids"]), case["greedy_margins"], strict=True
        ):
            assert below <= (0 if margin > MARGIN else MARGIN), where
    return differences, cached


def log_probabilities(server: Server, input_ids: list[int], token_ids: list[int], max_new_tokens: int = 8) -> dict:
    """Greedy continuation and the log-probabilities of `token_ids` after the prompt."""
    answer = server.generate(input_ids, max_new_tokens, return_logprob=True, token_ids_logprob=token_ids)
    first = answer["meta_info"]["output_token_ids_logprobs"][0]
    by_token = {token: value for value, token, _ in first}
    return {
        "ids": answer["output_ids"],
        "logprobs": [by_token[token] for token in token_ids],
        "cached": answer["meta_info"]["cached_tokens"],
    }


def example(name: str, *arguments: str) -> str:
    """Run one of examples/ as a user does; what it printed."""
    command = [sys.executable, str(REPOSITORY / "examples" / name), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout
