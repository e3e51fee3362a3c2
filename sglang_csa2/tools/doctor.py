"""`python -m sglang_csa2 doctor`: the table of routes for this machine, without a server; exit 1 where none can serve.

It asks what a start asks: the host's version and symbols, the flags in the environment, the card, the libraries.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from typing import Any

import torch

from sglang_csa2 import envs, host, routes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), help="what to serve on (default: the GPU if there is one)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    report = examine(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    print(json.dumps(report, indent=1) if arguments.json else _text(report))
    return 0 if report["serves"] else 1


def examine(device: str, machine: routes.Machine | None = None) -> dict[str, Any]:
    """The report. `serves` is whether a server would start with the flags as they are, whatever its other options."""
    machine, problems, flags = machine or routes.Machine.here(device), _host_problems(), None
    try:
        flags = routes.Flags.from_env()
        problems += routes.problems(machine, flags)
        envs.prefill_kv_reuse()
    except envs.EnvError as error:
        problems.append(str(error))
    chosen = {} if problems or flags is None else routes.choose(machine, flags)
    rows = []
    for route in routes.ROUTES:
        layout = flags.layout if flags and flags.layout in route.layouts else route.layouts[0]
        choice = chosen.get(route.op)
        rows.append(
            {
                "op": route.op,
                "route": route.name,
                "hardware": route.hardware,
                "library": route.library,
                "version": routes.library_version(route.library),
                "layouts": list(route.layouts),
                "chosen_when": route.chosen,
                "missing": route.missing(machine, layout),
                "brings": route.brings,
                "was_run": route.was_run,
                "chosen": choice.reason if choice and choice.route is route else None,
            }
        )
    return {
        "machine": {"device": machine.device, "name": machine.name, "capability": machine.capability / 10},
        "sglang": _version("sglang"),
        "torch": _version("torch"),
        "serves": not problems,
        "problems": problems,
        "routes": rows,
    }


def _host_problems() -> list[str]:
    try:
        host.check_version()
        host.check_symbols()
    except importlib.metadata.PackageNotFoundError:
        return [f"sglang is not installed: pip install sglang=={host.SUPPORTED_VERSIONS[-1]}"]
    except host.HostMismatch as mismatch:
        return [str(mismatch)]
    return []


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _text(report: dict[str, Any]) -> str:
    machine, rows = report["machine"], report["routes"]
    lines = [
        f"{machine['name']} ({machine['device']}, compute capability {machine['capability']:.1f}), "
        f"sglang {report['sglang']}, torch {report['torch']}",
        *(f"problem: {text}" for text in report["problems"]),
        "csa2 can serve here." if report["serves"] else "csa2 cannot serve here.",
        "",
    ]
    table = [("", "op", "route", "hardware", "library", "layout", "chosen when")]
    for row in rows:
        mark = "*" if row["chosen"] else "-" if row["missing"] else " "
        library = f"{row['library']} {row['version'] or ''}".rstrip()
        where = row["hardware"] + ("" if row["was_run"] else ", not run on hardware")
        table.append((mark, row["op"], row["route"], where, library, "/".join(row["layouts"]), row["chosen_when"]))
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    lines += ["", "* chosen, - missing here", ""]
    lines += [f"{row['op']}: {row['route']}, {row['chosen']}" for row in rows if row["chosen"]]
    for row in rows:
        if row["missing"]:
            what = f"{row['op']} through {row['route']} ({'/'.join(row['layouts'])})"
            lines.append(f"missing: {what}: {row['missing']}. It would bring {row['brings']}.")
    return "\n".join(lines)
