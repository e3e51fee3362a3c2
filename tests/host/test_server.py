"""A real server: the OpenAI API, and the host features that are free if coded to contract."""

from __future__ import annotations

import random
import shutil
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from answers import plain_question, question
from books import decode_rows
from served import CASE_BOUND, assert_same_answers, golden_cases, log_probabilities, mixed_tokens, serve

pytestmark = pytest.mark.server
CHAT = [{"role": "user", "content": "Hello, who are you?"}]


@pytest.fixture(scope="module")
def server(tiny_model):
    """Small chunks mixed into decode batches, the prefix cache and overlap scheduling on: the busiest schedule.

    Two pages a chunk: with one, and mixing on, the host admits no second request beside a running one.
    """
    arguments = ["--chunked-prefill-size", "512", "--enable-mixed-chunk", "--enable-metrics"]
    with serve(*arguments, "--decode-log-interval", "1") as server:
        yield server


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none")


def random_prompt(n: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 1024), k=n)


def test_the_log_states_the_bytes(server):
    # (288 + 68) / 2 for the ratio-2 source and 288 + 68 for the ratio-1 source of the tiny model.
    assert "bytes_per_full_token=534.00" in server.log
    assert "Traceback" not in server.log


def test_chat(client):
    answer = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=12, temperature=0)
    assert answer.choices[0].message.content and answer.usage.completion_tokens == 12


def test_streaming_gives_the_same_text(client):
    ask = {"model": "tiny", "messages": CHAT, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**ask).choices[0].message.content
    chunks = [chunk for chunk in client.chat.completions.create(**ask, stream=True) if chunk.choices]
    assert len(chunks) > 2
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


def test_completions(client):
    ask = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    text = client.completions.create(**ask).choices[0].text
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**ask, stream=True))
    assert text and streamed == text


@pytest.mark.parametrize("measured", [True, False], ids=["with log-probabilities", "mixed"])
def test_batch_mates_change_no_answer(server, measured):
    """Alone, then all at once in another order; the host mixes only requests that ask for no log-probabilities."""
    prompts = [random_prompt(n, seed=n) for n in (5, 130, 257, 300, 31, 64)]
    alone = [server.alone(prompt) for prompt in prompts]
    bodies = [
        question(prompt, 8, wanted) if measured else plain_question(prompt, 8)
        for prompt, wanted in zip(prompts, alone, strict=True)
    ]
    server.flush()
    before = len(server.log)
    with ThreadPoolExecutor(len(bodies)) as executor:
        together = list(executor.map(server.answer, reversed(bodies)))[::-1]
    server.flush()
    log = server.log[before:]
    assert max(decode_rows(log)) > 1 and (measured or mixed_tokens(log, together) > 0)
    assert_same_answers(server, prompts, together, alone, measured=measured)


def test_teacher_forced_probabilities_survive_batching(server):
    prompts = [random_prompt(n, seed=n) for n in (140, 261, 9, 77)]

    def forced(prompt):
        answer = server.generate(prompt, 1, return_logprob=True, logprob_start_len=0)
        return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]

    alone = [forced(prompt) for prompt in prompts]
    server.flush()
    with ThreadPoolExecutor(len(prompts)) as executor:
        together = list(executor.map(forced, prompts))
    for mine, theirs in zip(together, alone, strict=True):
        assert len(mine) == len(theirs)
        assert statistics.fmean(abs(a - b) for a, b in zip(mine, theirs, strict=True)) <= CASE_BOUND


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"input_ids": []}, 400),
        ({"input_ids": [5] * 5000}, 400),
        ({"input_ids": [5], "sampling_params": {"max_new_tokens": -1}}, 400),
        ({}, 400),
    ],
    ids=["empty prompt", "beyond the context", "negative length", "no prompt"],
)
def test_bad_requests_get_the_hosts_error(server, body, status):
    assert server.post("/generate", body).status_code == status
    assert server.generate([5, 6, 7], 2)["output_ids"]


def test_beam_search_is_refused_by_the_host(server):
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2, "beam_width": 2, "n": 2}}
    response = server.post("/generate", body)
    assert response.status_code == 400 and "Beam search" in response.text
    assert server.generate([5, 6, 7], 2)["output_ids"]


def test_cancelled_streams_return_what_they_held(server, client):
    before = server.baseline()
    for cut_after in (1, 3):
        stream = client.completions.create(model="tiny", prompt="word " * 90, max_tokens=200, stream=True)
        for _, _chunk in zip(range(cut_after), stream, strict=False):
            pass
        stream.close()
    assert server.baseline() == before


def test_abort_by_request_id(server):
    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(server.generate, [7] * 301, 3000, rid="to-abort")
        time.sleep(2)
        assert server.post("/abort_request", {"rid": "to-abort"}).status_code == 200
        assert running.result(timeout=60)["meta_info"]["finish_reason"]["type"] == "abort"
    server.flush()
    assert server.generate([7, 8], 2)["output_ids"]


def test_flush_forgets_prefixes(server):
    prompt = random_prompt(300, seed=1)
    server.flush()
    assert log_probabilities(server, prompt, [1, 2])["cached"] == 0
    assert log_probabilities(server, prompt, [1, 2])["cached"] == 256
    server.flush()
    assert log_probabilities(server, prompt, [1, 2])["cached"] == 0


def test_weights_can_be_updated(server, tiny_model, tmp_path):
    from make_tiny_checkpoint import write_weights

    prompt, ids = random_prompt(40, seed=3), list(range(20))
    before = log_probabilities(server, prompt, ids)
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    write_weights(other, seed=5)
    assert server.post("/update_weights_from_disk", {"model_path": str(other)}).json()["success"]
    assert log_probabilities(server, prompt, ids)["logprobs"] != before["logprobs"]
    assert server.post("/update_weights_from_disk", {"model_path": str(tiny_model)}).json()["success"]
    server.flush()
    assert log_probabilities(server, prompt, ids)["logprobs"] == before["logprobs"]


def test_retraction_recomputes_the_same_answer(tiny_model):
    """Six requests grow into their second page in a pool of eight: some are retracted, and end as if alone."""
    prompts = [random_prompt(250, seed=i) for i in range(6)]
    steps = 16
    tight = ["--max-total-tokens", "2048", "--schedule-conservativeness", "0"]
    with serve(*tight, "--skip-tokenizer-init", "--enable-metrics", "--disable-radix-cache") as server:
        before = server.baseline()
        alone = [server.alone(prompt, steps) for prompt in prompts]
        bodies = [question(prompt, steps, wanted) for prompt, wanted in zip(prompts, alone, strict=True)]
        # When each arrives is the machine's to say: again, until some were retracted.
        for _ in range(4):
            with ThreadPoolExecutor(len(prompts)) as executor:
                together = list(executor.map(server.answer, bodies))
            # Before a comparison, which may flush and so clear a leak away.
            assert server.baseline() == before
            assert_same_answers(server, prompts, together, alone)
            if retracted := sum(answer["meta_info"]["num_retractions"] for answer in together):
                break
        assert "#retracted_reqs" in server.log
        assert retracted > 0


def test_decoder_bounded_replay(tiny_model):
    """The late layers run on each prompt's last 128 rows: exact up to 128 tokens, close beyond, whole on request."""
    cases = {len(case["input_ids"]): case for case in golden_cases("tiny-dsv41")}
    with serve("--skip-tokenizer-init", "--enable-decoder-swa-bounded-replay") as server:
        for n in (1, 8, 127, 128):
            answer = log_probabilities(server, cases[n]["input_ids"], cases[n]["top20_ids"])
            golden = zip(answer["logprobs"], cases[n]["top20_logprobs"], strict=True)
            assert statistics.fmean(abs(a - b) for a, b in golden) <= CASE_BOUND
        prompt = cases[257]["input_ids"]
        replayed = log_probabilities(server, prompt, cases[257]["top20_ids"])["logprobs"]
        server.flush()
        # A reader of prompt log-probabilities keeps every row, mixed with requests that do not.
        with ThreadPoolExecutor(3) as executor:
            others = [executor.submit(server.generate, random_prompt(200, seed=s), 4) for s in (1, 2)]
            reader = server.generate(
                prompt, 1, return_logprob=True, logprob_start_len=0, token_ids_logprob=cases[257]["top20_ids"]
            )
            assert all(other.result()["output_ids"] for other in others)
        assert len(reader["meta_info"]["input_token_logprobs"]) == len(prompt)
        exact = {token: value for value, token, _ in reader["meta_info"]["output_token_ids_logprobs"][0]}
        exact = [exact[token] for token in cases[257]["top20_ids"]]
        golden = cases[257]["top20_logprobs"]
        assert statistics.fmean(abs(a - b) for a, b in zip(exact, golden, strict=True)) <= CASE_BOUND
        # The approximation moves the answer, or it did not run; the exact path is nearer to the published code.
        moved = statistics.fmean(abs(a - b) for a, b in zip(replayed, golden, strict=True))
        assert 0.01 < moved < 0.5
