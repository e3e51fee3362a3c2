"""Chat, streaming and a long context with the openai client.

scripts/serve.sh                                # in another terminal
python examples/openai_client.py                # [--url http://127.0.0.1:30000] [--words 1000]
"""

from __future__ import annotations

import argparse

import openai


def chat(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Hello, who are you?"}], max_tokens=16, temperature=0
    )
    print("chat:", repr(answer.choices[0].message.content))


def stream(client: openai.OpenAI, model: str) -> None:
    pieces = client.completions.create(
        model=model, prompt="Once upon a time", max_tokens=16, temperature=0, stream=True
    )
    print("stream:", end=" ", flush=True)
    for piece in pieces:
        print(piece.choices[0].text, end="|", flush=True)
    print()


def long_context(client: openai.OpenAI, model: str, words: int) -> None:
    """The same long prompt twice: the second time most of it comes from the prefix cache, and the answer stays."""
    prompt = " ".join(f"line {number} of a long text" for number in range(words // 6))
    answers = []
    for _ in range(2):
        answer = client.completions.create(model=model, prompt=prompt, max_tokens=8, temperature=0)
        answers.append(answer.choices[0].text)
        # Reported when the server runs with --enable-cache-report.
        details = answer.usage.prompt_tokens_details
        cached = "" if details is None else f", {details.cached_tokens} of them from the prefix cache"
        print(f"long context: {answer.usage.prompt_tokens} tokens{cached}: {answer.choices[0].text!r}")
    print("the same answer twice" if answers[0] == answers[1] else "the answers differ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--words", type=int, default=1000, help="length of the long prompt")
    arguments = parser.parse_args()
    client = openai.OpenAI(base_url=arguments.url + "/v1", api_key="none")
    try:
        model = client.models.list().data[0].id
    except openai.APIConnectionError:
        raise SystemExit(
            f"no server answers at {arguments.url}: start scripts/serve.sh and wait until it is ready"
        ) from None
    chat(client, model)
    stream(client, model)
    long_context(client, model, arguments.words)


if __name__ == "__main__":
    main()
