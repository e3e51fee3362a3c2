"""Draw what `bench_decode.py layer --json FILE` measured: time of an index layer's choice against the context.

    python scripts/plot_decode.py FILE.json docs/images/decode-layers.svg [--rows 8]

One line per kind of layer and, where the host was installed, one for its logits alone. Needs matplotlib (the extra
`plots`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

NAMES = {"full": "Full", "source": "Full, candidate source", "reindex": "Reindex"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--rows", type=int, default=8)
    options = parser.parse_args()
    measured = json.loads(options.file.read_text())
    results = [result for result in measured["layer"] if result["rows"] == options.rows]
    figure, axes = plt.subplots(figsize=(7, 4.2))
    stock = {result["entries"]: result["stock"] for result in results if "stock" in result}
    if stock:
        axes.plot(*zip(*sorted(stock.items()), strict=True), "k--o", label="stock dsv4: logits alone")
    for step, name in NAMES.items():
        points = sorted((result["entries"], result["cuda"]) for result in results if result["step"] == step)
        axes.plot(*zip(*points, strict=True), "-o", label=f"csa2: {name}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    entries = sorted({result["entries"] for result in results})
    axes.set_xticks(entries, [f"{count // 1024}K" for count in entries])
    axes.set_xlabel("entries of context")
    axes.set_ylabel("microseconds")
    axes.set_title(f"Decode, {options.rows} rows, {measured['gpu']}: scores to slots of one layer")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.tight_layout()
    figure.savefig(options.picture)


if __name__ == "__main__":
    main()
