"""Field reports that need the real scheduler: one server, every pool invariant checked in every forward.

docs/conformance.md has the table. Prefill chunks mixed into decode batches, the prefix cache and overlap on, and a pool
small enough that prefixes are evicted and requests retracted. Two pages a chunk: with one, and mixing on, the host
admits no second request beside a running one, and it mixes only requests that ask for no log-probabilities. With
CSA2_TEST_BACKEND=dsv4 on a GPU the host's own backend serves the 64-head model instead: what the table says of it.
"""

from __future__ import annotations

import json
import os
import random
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
import soak
from answers import plain_question, question
from books import decode_rows
from served import DEVICE, assert_same_answers, mixed_tokens, serve, server_options

from sglang_csa2 import plugin, routes

pytestmark = pytest.mark.server
BACKEND = os.environ.get("CSA2_TEST_BACKEND", "csa2")
csa2_alone = pytest.mark.skipif(BACKEND != "csa2", reason="of csa2's own")


@pytest.fixture(scope="module")
def server(request):
    arguments = ["--chunked-prefill-size", "512", "--enable-mixed-chunk", "--enable-metrics", "--skip-tokenizer-init"]
    # Admits more than the pool holds, so that some are retracted, and logs every decode batch.
    arguments += ["--schedule-conservativeness", "0", "--decode-log-interval", "1"]
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


def together(server, bodies: list[dict], parallel: int = 8) -> tuple[list[dict], str]:
    """Answers to all at once, and the log meanwhile."""
    before = len(server.log)
    with ThreadPoolExecutor(parallel) as executor:
        found = list(executor.map(server.answer, bodies))
    # Refused until the last result is booked, and so logged.
    server.flush()
    return found, server.log[before:]


def cached(answer: dict) -> int:
    return answer["meta_info"]["cached_tokens"]


@pytest.mark.parametrize("n", [257, 258, 300, 512, 513])
def test_hits_of_whole_and_nearly_whole_prompts(server, n):
    """Hits followed by one token, whole prompts, prompts below 4096 (reports 10, 11, 12).

    https://github.com/sgl-project/sglang/pull/30339 https://github.com/ROCm/ATOM/issues/1417
    https://github.com/vllm-project/vllm-ascend/issues/13980 https://github.com/vllm-project/vllm-ascend/issues/16270
    """
    ids = prompt(n, seed=n)
    wanted = server.alone(ids, 6)
    again = server.answer(question(ids, 6, wanted))
    assert cached(again) == (n - 1) // 256 * 256
    assert_same_answers(server, [ids], [again], [wanted])


def test_two_live_requests_on_one_prefix(server):
    """The compressor's state of one request reached another on the same radix prefix (report 9).

    https://github.com/sgl-project/sglang/issues/35494
    """
    shared = prompt(256, seed=1)
    prompts = [shared + prompt(n, seed=n) for n in (1, 2, 5)]
    wanted = [server.alone(ids, 16) for ids in prompts]
    server.flush()
    # The prefix is there before any of them, so that each hits it.
    server.generate([*shared, 5], 1)
    answers, log = together(server, [question(ids, 16, one) for ids, one in zip(prompts, wanted, strict=True)])
    assert [cached(answer) for answer in answers] == [256, 256, 256]
    assert max(decode_rows(log)) == 3
    assert_same_answers(server, prompts, answers, wanted)


def test_more_sessions_than_the_pool_holds(server):
    """Tails of long sessions are evicted first, and a miss costs a recomputation, which is reported (report 14).

    https://github.com/sgl-project/sglang/issues/35129
    """
    sessions = [prompt(300, seed=s) for s in range(40, 52)]
    first, last = sessions[0], sessions[-1]
    before = server.baseline()
    wanted = {"last": server.alone(last, 6), "first": server.alone(first, 6)}
    # Twelve sessions keep a page each and one runs on two, in a pool of ten pages.
    for ids in sessions[1:5]:
        server.generate(ids, 1)
    assert cached(server.generate(first, 1)) == 256
    for ids in sessions[1:]:
        server.generate(ids, 1)
    survivor = server.answer(question(last, 6, wanted["last"]))
    again = server.answer(question(first, 6, wanted["first"]))
    assert (cached(survivor), cached(again)) == (256, 0)
    # Before a comparison, which may flush and so clear a leak away.
    assert server.baseline() == before
    assert_same_answers(server, [last, first], [survivor, again], [wanted["last"], wanted["first"]])


def test_an_abort_between_the_halves_of_a_pair(server):
    """Aborts after odd and even numbers of tokens, on a cached prefix that others hold (reports 45, 48).

    https://github.com/sgl-project/sglang/issues/33385 https://github.com/kvcache-ai/ktransformers/issues/1985
    """
    shared = prompt(256, seed=2)
    ids = [*shared, 9, 8, 7]
    wanted = server.alone(ids, 12)
    before = server.baseline()
    server.generate([*shared, 5], 1)
    parities = set()
    with ThreadPoolExecutor(2) as executor:
        # When an abort takes effect is the server's to say: more until both kinds have been met.
        for after in range(1, 9):
            living = executor.submit(server.answer, question(ids, 12, wanted))
            parities.add(tokens_before_an_abort(server, [*shared, 4, 4], after) % 2)
            # Takes the slot that the other left.
            follower = executor.submit(server.answer, question(ids, 12, wanted))
            answers = [living.result(), follower.result()]
            assert [cached(answer) for answer in answers] == [256, 256]
            # Before a comparison, which may flush and so clear a leak away.
            assert server.baseline() == before
            assert_same_answers(server, [ids, ids], answers, [wanted, wanted])
            if parities == {0, 1}:
                break
            # The prefix that a flush may have taken.
            server.generate([*shared, 5], 1)
    assert parities == {0, 1}


def tokens_before_an_abort(server, ids: list[int], after: int) -> int:
    """Abort a stream of up to 200 tokens once it has given `after`; how many it gave in the end."""
    sampling = {"max_new_tokens": 200, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": ids, "stream": True, "sampling_params": sampling, "rid": f"aborted after {after}"}
    with requests.post(server.url + "/generate", json=body, stream=True, timeout=60) as stream:
        for line in stream.iter_lines():
            if not line.startswith(b"data: {"):
                continue
            answer = json.loads(line[6:])
            if len(answer["output_ids"]) == after:
                assert server.post("/abort_request", {"rid": body["rid"]}).status_code == 200
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    return answer["meta_info"]["completion_tokens"]


def test_requests_of_all_sizes_at_once(server):
    """Decode rows beside prefill chunks of every boundary length; retractions in a small pool (reports 45, 46).

    https://github.com/sgl-project/sglang/issues/24241 https://github.com/sgl-project/sglang/issues/30338
    """
    # Six that grow into their second page together, in a pool of ten pages, and those that are admitted beside them.
    sizes = [(n, 24) for n in (240, 242, 244, 246, 248, 249)]
    sizes += [(n, 6) for n in (1, 2, 7, 127, 128, 129, 255, 256, 257, 511)]
    prompts = [prompt(n, seed=n) for n, _ in sizes]
    wanted = [server.alone(ids, steps) for ids, (_, steps) in zip(prompts, sizes, strict=True)]
    plain = [plain_question(ids, steps) for ids, (_, steps) in zip(prompts, sizes, strict=True)]
    bodies = [question(ids, steps, one) for ids, (_, steps), one in zip(prompts, sizes, wanted, strict=True)]
    # When each arrives is the machine's to say: again, until some were retracted, and some mixed where the host mixes.
    for measured, wave in ((False, plain), (True, bodies)):
        retracted, mixed = 0, 0
        for _ in range(4):
            server.flush()
            answers, log = together(server, wave)
            assert_same_answers(server, prompts, answers, wanted, measured=measured)
            assert max(decode_rows(log)) > 2
            retracted, mixed = retracted + retractions(answers, log), mixed + mixed_tokens(log, answers)
            if retracted and (mixed or measured):
                break
        assert retracted > 0 and (mixed > 0 or measured)


def retractions(answers: list[dict], log: str) -> int:
    """As the answers count them, and as the log does."""
    counted = sum(answer["meta_info"]["num_retractions"] for answer in answers)
    assert counted == sum(int(n) for n in re.findall(r"#retracted_reqs: (\d+)", log))
    return counted


def test_a_prompt_past_the_context_is_refused(server):
    """A prompt beyond what the tables hold (report 37).

    https://github.com/sgl-project/sglang/issues/34718
    """
    assert server.post("/generate", {"input_ids": [5] * 4097}).status_code == 400
    assert server.generate([5, 6], 1)["output_ids"]


def test_a_short_soak(server):
    """Serves, then crashes (report 51): sixty requests through scripts/soak.py, streams cut, some malformed.

    https://github.com/vllm-project/vllm/issues/56700
    """
    run = soak.Soak(server.url, seed=5, vocabulary=1024)
    run.prompts = run.prompts[:10]
    run.references()
    before = run.books()
    run.run(60, 8)
    assert run.books() == before
    tally = run.compare()
    print(f"\n{tally}")
    assert run.problems == [] and len(tally) == run.seen["whole"] + run.seen["streamed"]
    assert {measured for _, measured, _ in run.answered} == {True, False}
    assert run.seen["whole"] and run.seen["streamed"] and run.seen["cut before the end"] and run.seen["malformed"]


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

    A chunk of one page makes progress: tests/golden/test_served.py runs with it.
    https://github.com/vllm-project/vllm-ascend/issues/15204
    """
    from sglang.srt.server_args import prepare_server_args

    plugin.register()
    arguments = server_options(30000, "--chunked-prefill-size", "128", "--skip-tokenizer-init")
    server_args = prepare_server_args(arguments)
    server_args.resolve_once()
    with pytest.raises(AssertionError, match="chunked_prefill_size must be divisible by page_size"):
        server_args.check_server_args()
