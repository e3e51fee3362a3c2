"""A model in this process, without a server: sglang.Engine with csa2 on the CPU.

python examples/offline_engine.py [--model configs/tiny-dsv41]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import sglang

TINY = Path(__file__).parents[1] / "configs" / "tiny-dsv41"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=TINY)
    arguments = parser.parse_args()
    engine = sglang.Engine(
        model_path=str(arguments.model),
        attention_backend="csa2",
        device="cpu",
        # Small pools for a small machine.
        max_running_requests=4,
        max_total_tokens=16384,
        log_level="error",
    )
    prompts = ["Hello", "The capital of France is", "word " * 300]
    answers = engine.generate(prompts, sampling_params={"temperature": 0, "max_new_tokens": 8})
    for prompt, answer in zip(prompts, answers, strict=True):
        print(f"{answer['meta_info']['prompt_tokens']:>5} tokens, {prompt[:30]!r} -> {answer['text']!r}")
    engine.shutdown()


# The engine starts processes that import this file again.
if __name__ == "__main__":
    main()
