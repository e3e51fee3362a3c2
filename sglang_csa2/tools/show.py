"""`python -m sglang_csa2 show`: the layer map, and what the layers of a model read over a prompt."""

from __future__ import annotations

import argparse
from pathlib import Path

from sglang_csa2.layer_plan import LayerPlan
from sglang_csa2.tools import layer_map
from sglang_csa2.tools.plan import read_model


class ShowError(ValueError):
    """Arguments of `show` that do not go together."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="a model's folder or its config.json")
    parser.add_argument("--svg", type=Path, help="also write the layer map as SVG")
    parser.add_argument(
        "--trace", type=Path, metavar="PROMPT.txt", help="run this prompt on the CPU and show what was read"
    )
    parser.add_argument("--trace-from", type=Path, metavar="FOLDER", help="show the last request of a folder that a "
                        "server wrote with SGLANG_CSA2_TRACE=FOLDER")  # fmt: skip
    parser.add_argument("--new-tokens", type=int, default=4, help="tokens to generate after the prompt")
    parser.add_argument("--out", type=Path, help="write the trace as an image (needs matplotlib)")


def run(arguments: argparse.Namespace) -> int:
    _, plan, folder = read_model(arguments.model)
    if arguments.trace and arguments.trace_from:
        raise ShowError("--trace runs a prompt and --trace-from reads what was run: give one of them")
    if arguments.out and not (arguments.trace or arguments.trace_from):
        raise ShowError(
            "--out draws a trace and there is none: give --trace or --trace-from; --svg draws the layer map"
        )
    if arguments.svg:
        arguments.svg.write_text(layer_map.as_svg(plan))
        print(f"wrote {arguments.svg}")
    if arguments.trace or arguments.trace_from:
        _show_trace(arguments, plan, folder)
    elif not arguments.svg:
        print(layer_map.as_text(plan))
    return 0


def _show_trace(arguments: argparse.Namespace, plan: LayerPlan, folder: Path | None) -> None:
    from sglang_csa2.tools import pictures
    from sglang_csa2.tools.recorded import read

    if arguments.trace_from:
        recording = read(arguments.trace_from, plan)
    else:
        from sglang_csa2.tools.served import TracedEngine

        if folder is None:
            raise ShowError(f"--trace serves the model, and --model is {str(arguments.model)!r}: give its folder")
        prompt = arguments.trace.read_text()
        with TracedEngine(folder, plan) as engine:
            answer, recording = engine.run(prompt, arguments.new_tokens)
        print(f"{answer['meta_info']['prompt_tokens']} tokens, then {answer['text']!r}")
    print(report(recording, plan))
    if arguments.out:
        pictures.draw(recording, plan, arguments.out)
        print(f"wrote {arguments.out}")


def report(recording, plan: LayerPlan) -> str:
    """Per index layer, what its last row chose and how its choices relate to its source's, as a table."""
    from sglang_csa2.tools.recorded import overlaps

    columns = f"{'chosen of visible':>18}  {'with source':>11}  {'kept by pool':>12}   of the last row"
    lines = [f"{'layer':>5}  {'role':8} {columns}"]
    for found in overlaps(recording, plan):
        choices = recording.layers[found.layer_id]
        chosen = choices.positions[-1][choices.positions[-1] >= 0].tolist()
        visible = int(recording.rows[-1] + 1) // choices.layer.ratio
        shares = [("-" if value is None else f"{value:.1%}") for value in (found.with_source, found.recall)]
        lines.append(
            f"{found.layer_id:>5}  {choices.layer.role.value:8} {f'{len(chosen)} of {visible}':>18}  {shares[0]:>11}  "
            f"{shares[1]:>12}   {_ranges(chosen)}"
        )
    contested = max((found.rows for found in overlaps(recording, plan)), default=0)
    lines += [
        "",
        f"Shares are means over the rows that see more entries than they may choose (up to {contested} of "
        f"{len(recording.rows)} rows).",
        "with source: entries that the pool's source chose too. kept by pool: entries that the layer would have chosen",
        "without the pool and still did.",
    ]
    return "\n".join(lines)


def _ranges(entries: list[int], most: int = 6) -> str:
    """Ascending entries as ranges, the first few."""
    runs: list[list[int]] = []
    for entry in entries:
        if runs and entry == runs[-1][1] + 1:
            runs[-1][1] = entry
        else:
            runs.append([entry, entry])
    shown = [f"{first}-{last}" if last > first else str(first) for first, last in runs[:most]]
    return ", ".join(shown) + (", ..." if len(runs) > most else "")
