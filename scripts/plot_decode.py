"""Draw what `bench_decode.py layer --json FILE` measured: time of an index layer's choice against the context.

    python scripts/plot_decode.py FILE.json docs/images/decode-layers.svg [--rows 1 8]

A panel per number of rows; a line per kind of layer and, where the host was installed, one for its logits alone. Needs
matplotlib (the extra `plots`).
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
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    measured = json.loads(options.file.read_text())
    figure, panels = plt.subplots(
        1, len(options.rows), figsize=(4.8 * len(options.rows), 4.2), squeeze=False, sharey=True
    )
    for axes, rows in zip(panels[0], options.rows, strict=True):
        draw(axes, rows, [result for result in measured["layer"] if result["rows"] == rows])
    panels[0, 0].set_ylabel("microseconds")
    panels[0, 0].legend()
    figure.suptitle(f"Decode, {measured['gpu']}: scores to slots of one layer")
    figure.tight_layout()
    figure.savefig(options.picture)


def draw(axes, rows: int, results: list[dict]) -> None:
    stock = {result["entries"]: result["stock"] for result in results if "stock" in result}
    if stock:
        axes.plot(*zip(*sorted(stock.items()), strict=True), "k--o", label="stock dsv4: logits alone")
    for step, name in NAMES.items():
        points = sorted((result["entries"], result["cuda"]) for result in results if result["step"] == step)
        axes.plot(*zip(*points, strict=True), "-o", label=f"csa2: {name}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    entries = sorted({result["entries"] for result in results})
    axes.set_xticks(entries, [f"{n >> 20}M" if n >> 20 else f"{n >> 10}K" for n in entries])
    axes.set_xlabel("entries of context")
    axes.set_title(f"{rows} row{'s' if rows > 1 else ''}")
    axes.grid(alpha=0.3, which="both")


if __name__ == "__main__":
    main()
