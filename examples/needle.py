"""A needle in a long context: which positions each index layer chose for the last token, and how many are the needle's.

    python examples/needle.py [--tokens 1500] [--depth 0.4] [--out needle.png]

The tiny model has random weights, so it does not look for a needle and finds it no more often than chance would: what
this shows is the machinery that a trained model's skill can be watched with.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from sglang_csa2.tools import pictures
from sglang_csa2.tools.plan import read_model
from sglang_csa2.tools.served import TracedEngine
from sglang_csa2.tools.show import report

TINY = Path(__file__).parents[1] / "configs" / "tiny-dsv41"
NEEDLE = [701, 702, 703, 704, 705, 706, 707, 708]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--depth", type=float, default=0.4, help="where the needle lies, 0 to 1")
    parser.add_argument("--out", type=Path, help="write an image (needs matplotlib)")
    arguments = parser.parse_args()
    hay = random.Random(0).choices(range(100, 600), k=arguments.tokens - 2 * len(NEEDLE))
    start = int(arguments.depth * len(hay))
    # The needle, and at the end the needle again: what a question about it would hold.
    prompt = hay[:start] + NEEDLE + hay[start:] + NEEDLE
    _, plan, _ = read_model(TINY)
    with TracedEngine(TINY, plan, skip_tokenizer_init=True) as engine:
        answer, recording = engine.run(prompt)
    print(f"{answer['meta_info']['prompt_tokens']} tokens, the needle at {start} to {start + len(NEEDLE) - 1}")
    print(report(recording, plan))
    print()
    for layer_id, choices in recording.layers.items():
        ratio = choices.layer.ratio
        entries = set(range(start // ratio, (start + len(NEEDLE) - 1) // ratio + 1))
        chosen = {entry for entry in choices.positions[-1].tolist() if entry >= 0}
        visible = int(recording.rows[-1] + 1) // ratio
        by_chance = len(chosen) * len(entries) / visible
        print(
            f"layer {layer_id}: {len(chosen & entries)} of the needle's {len(entries)} entries chosen "
            f"({by_chance:.2f} expected by chance)"
        )
    if arguments.out:
        pictures.draw(recording, plan, arguments.out)
        print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
