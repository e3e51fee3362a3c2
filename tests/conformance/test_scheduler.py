"""Field reports that need the real scheduler: one server, every pool invariant checked in every forward.

docs/conformance.md has the table. Chunks of one page mixed into decode batches, the prefix cache and overlap on, and a
pool small enough that prefixes are evicted. With CSA2_TEST_BACKEND=dsv4 on a GPU the host's own backend serves the
64-head model instead: what the table says of the host.
"""

from __future__ import annotations

import os
import random
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
import soak
from served import DEVICE, MARGIN, serve, server_options

from sglang_csa2 import plugin, routes

pytestmark = pytest.mark.server
BACKEND = os.environ.get("CSA2_TEST_BACKEND", "csa2")
csa2_alone = pytest.mark.skipif(BACKEND != "csa2", reason="of csa2's own")


@pytest.fixture(scope="module")
def server(request):
    arguments = ["--chunked-prefill-size", "256", "--enable-mixed-chunk", "--enable-metrics", "--skip-tokenizer-init"]
    # The host's kernels want 64 heads.
    model = request.getfixturevalue("tiny_model" if BACKEND == "csa2" else "tiny_model_64h")
    where = {"model": model, "backend": BACKEND, "env": {"SGLANG_CSA2_CHECK": "1"}}
    if DEVICE == "cuda" and BACKEND == "csa2":
        # The invariants cannot be seen in a graph.
        arguments += ["--cuda-graph-backend-decode", "disabled"]
    with serve(*arguments, "--max-total-tokens", "2560", **where) as server:
        yield server
        assert "CheckError" not in server.log


def prompt(n: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 1024), k=n)


def ask(server, ids: list[int], steps: int = 6) -> dict:
    return server.generate(ids, steps, return_logprob=True, top_logprobs_num=2)


def assert_same_answer(answer: dict, wanted: dict) -> None:
    """Equal tokens while every margin is wide."""
    pairs = wanted["meta_info"]["output_top_logprobs"]
    for step, (best, second) in enumerate(pairs):
        if best[0] - second[0] <= MARGIN:
            break
        assert answer["output_ids"][step] == wanted["output_ids"][step], f"step {step}"
    assert len(answer["output_ids"]) == len(wanted["output_ids"])
    first, other = (entry["meta_info"]["output_token_logprobs"][0] for entry in (answer, wanted))
    assert first[1] != other[1] or abs(first[0] - other[0]) <= 0.12


def alone(server, ids: list[int], steps: int = 6) -> dict:
    server.flush()
    answer = ask(server, ids, steps)
    assert answer["meta_info"]["cached_tokens"] == 0
    return answer


@pytest.mark.parametrize("n", [257, 258, 300, 512, 513])
def test_hits_of_whole_and_nearly_whole_prompts(server, n):
    """Hits followed by one token, whole prompts, prompts below 4096 (reports 10, 11, 12).

    https://github.com/sgl-project/sglang/pull/30339 https://github.com/ROCm/ATOM/issues/1417
    https://github.com/vllm-project/vllm-ascend/issues/13980 https://github.com/vllm-project/vllm-ascend/issues/16270
    """
    wanted = alone(server, prompt(n, seed=n))
    again = ask(server, prompt(n, seed=n))
    assert again["meta_info"]["cached_tokens"] == (n - 1) // 256 * 256
    assert_same_answer(again, wanted)


def test_two_live_requests_on_one_prefix(server):
    """The compressor's state of one request reached another on the same radix prefix (report 9).

    https://github.com/sgl-project/sglang/issues/35494
    """
    shared = prompt(256, seed=1)
    prompts = [shared + prompt(n, seed=n) for n in (1, 2, 5)]
    wanted = [alone(server, ids, 9) for ids in prompts]
    with ThreadPoolExecutor(3) as executor:
        answers = list(executor.map(lambda ids: ask(server, ids, 9), prompts))
    for answer, one in zip(answers, wanted, strict=True):
        assert_same_answer(answer, one)


def test_more_sessions_than_the_pool_holds(server):
    """Tails of long sessions are evicted first, and a miss costs a recomputation, which is reported (report 14).

    https://github.com/sgl-project/sglang/issues/35129
    """
    prompts = [prompt(300, seed=s) for s in range(40, 52)]
    wanted = alone(server, prompts[0])
    before = server.baseline()
    for ids in prompts[1:]:
        ask(server, ids, 1)
    again = ask(server, prompts[0])
    assert again["meta_info"]["cached_tokens"] in (0, 256)
    assert_same_answer(again, wanted)
    assert server.baseline() == before


@pytest.mark.parametrize("tokens", [1, 2])
def test_an_abort_between_the_halves_of_a_pair(server, tokens):
    """An abort at an odd and at an even position, on a cached prefix that others hold (reports 45, 48).

    https://github.com/sgl-project/sglang/issues/33385 https://github.com/kvcache-ai/ktransformers/issues/1985
    """
    shared = prompt(256, seed=2)
    wanted = alone(server, [*shared, 9, 8, 7], 12)
    before = server.baseline()
    ask(server, [*shared, 5], 1)
    with ThreadPoolExecutor(2) as executor:
        living = executor.submit(ask, server, [*shared, 9, 8, 7], 12)
        body = {"input_ids": [*shared, 4, 4], "stream": True, "sampling_params": {"max_new_tokens": 200}}
        with requests.post(server.url + "/generate", json=body, stream=True, timeout=60) as stream:
            lines = (line for line in stream.iter_lines() if line)
            for _ in range(tokens):
                next(lines)
        # Takes the slot that the other left.
        follower = executor.submit(ask, server, [*shared, 9, 8, 7], 12)
        assert_same_answer(living.result(), wanted)
        assert_same_answer(follower.result(), wanted)
    assert server.baseline() == before


def test_requests_of_all_sizes_at_once(server):
    """Decode rows beside prefill chunks of every boundary length; retractions in a small pool (reports 45, 46).

    https://github.com/sgl-project/sglang/issues/24241 https://github.com/sgl-project/sglang/issues/30338
    """
    prompts = [prompt(n, seed=n) for n in (1, 2, 7, 127, 128, 129, 255, 256, 257, 511)]
    wanted = [alone(server, ids) for ids in prompts]
    server.flush()
    with ThreadPoolExecutor(8) as executor:
        answers = list(executor.map(lambda ids: ask(server, ids), prompts))
    for answer, one in zip(answers, wanted, strict=True):
        assert_same_answer(answer, one)


def test_a_prompt_past_the_context_is_refused(server):
    """A prompt beyond what the tables hold (report 37).

    https://github.com/sgl-project/sglang/issues/34718
    """
    assert server.post("/generate", {"input_ids": [5] * 4097}).status_code == 400
    assert ask(server, [5, 6], 1)["output_ids"]


def test_a_short_soak(server):
    """Serves, then crashes (report 51): sixty requests through scripts/soak.py, streams cut, some malformed.

    https://github.com/vllm-project/vllm/issues/56700
    """
    run = soak.Soak(server.url, seed=5, vocabulary=1024)
    run.prompts = run.prompts[:10]
    run.references()
    before = run.books()
    run.run(60, 8)
    assert run.problems == [] and run.books() == before
    assert run.seen["whole"] and run.seen["streamed"] and run.seen["cut"] and run.seen["malformed"]


@csa2_alone
def test_metrics_on_the_hosts_endpoint(server):
    """The route of every operation, bytes by kind, rows beyond the pool; nothing refused, nothing fallen back."""
    server.flush()
    before = requests.get(server.url + "/metrics", timeout=60).text
    server.generate(prompt(140, seed=8), 2)
    text = requests.get(server.url + "/metrics", timeout=60).text

    def value(name: str, labels: str = "", of: str = text) -> float:
        return float(re.search(rf"^{re.escape(name + labels)} (\S+)", of, re.MULTILINE).group(1))

    chosen = routes.choose(routes.Machine.here(DEVICE), routes.Flags.from_env())
    serving = {operation: choice.route.name for operation, choice in chosen.items()}
    if DEVICE == "cuda":
        # Under checks a prefill reads packed records.
        serving[routes.PREFILL] = "packed records"
    found = re.findall(r'^csa2:route\{op="([^"]+)",route="([^"]+)"\} (\S+)', text, re.MULTILINE)
    assert {(operation, route): float(one) for operation, route, one in found} == dict.fromkeys(serving.items(), 1.0)
    assert set(serving) == set(routes.OPERATIONS)
    rows, beyond = (value(name) - value(name, of=before) for name in ("csa2:rows_total", "csa2:rows_beyond_pool_total"))
    # 140 rows of prefill and one of decode; the pool holds 128 entries of ratio 1.
    assert (rows, beyond) == (141, 13)
    assert (
        0
        < value("csa2:kv_bytes", '{kind="global",state="used"}')
        <= value("csa2:kv_bytes", '{kind="global",state="allocated"}')
    )
    assert (
        0
        < value("csa2:kv_bytes", '{kind="swa",state="used"}')
        <= value("csa2:kv_bytes", '{kind="swa",state="allocated"}')
    )
    assert value("csa2:refused_total") == value("csa2:fallen_back_total") == 0


@csa2_alone
def test_a_chunk_below_a_page_is_refused_at_start(tiny_model):
    """A chunk that can never be admitted (report 13): the host refuses it instead of waiting for ever.

    A chunk of one page, which the server of this module runs with, makes progress.
    https://github.com/vllm-project/vllm-ascend/issues/15204
    """
    from sglang.srt.server_args import prepare_server_args

    plugin.register()
    arguments = server_options(30000, "--chunked-prefill-size", "128", "--skip-tokenizer-init")
    server_args = prepare_server_args(arguments)
    server_args.resolve_once()
    with pytest.raises(AssertionError, match="chunked_prefill_size must be divisible by page_size"):
        server_args.check_server_args()
