"""`python -m sglang_csa2 plan`: how much context and how many requests fit, against the host's own layout.

The figures are those of one GPU: CSA2's keys are shared by all heads, so tensor parallelism divides the weights and
every rank keeps the whole cache.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_csa2 import envs
from sglang_csa2.config import Csa2Config
from sglang_csa2.layer_plan import LayerPlan
from sglang_csa2.layout import PAGE_TOKENS
from sglang_csa2.tools.budget import CSA2, CSA2_V4, GIB, STOCK, Budget, Serving
from sglang_csa2.tools.weights import weights_of

# Total memory in MiB as the driver reports it.
GPUS = {"h20": 97871, "h100": 81559, "h200": 143771, "b200": 183359}
# CUDA contexts, NCCL and libraries before a weight is loaded; an estimate.
_RUNTIME_GIB = 2.0


class PlanError(ValueError):
    """A plan that cannot be made: names the value, the rule and the remedy."""


@dataclass(frozen=True)
class Memory:
    """One GPU's memory, in bytes, and where the KV budget comes from."""

    total: float | None
    weights: float | None
    weights_source: str
    reserve: float | None
    kv: float


def read_model(path: Path) -> tuple[dict[str, Any], LayerPlan, Path | None]:
    """The text config, the layer plan and the folder (None for a bare config) of `--model`."""
    config = path / "config.json" if path.is_dir() else path
    if not config.is_file():
        raise PlanError(f"--model is {str(path)!r}: it must be a folder with config.json, or a config file")
    raw = json.loads(config.read_text())
    settings = {**raw, **raw.get("text_config", {})}
    return settings, LayerPlan.from_config(Csa2Config.from_hf(raw)), path if path.is_dir() else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="a model's folder or its config.json")
    parser.add_argument("--gpu", help=f"one of {', '.join(sorted(GPUS))}; or --gpu-gib")
    parser.add_argument("--gpu-gib", type=float, help="memory of one GPU in GiB, for a GPU that is not in the list")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel ranks: they divide the weights")
    parser.add_argument("--context", type=int, default=131072, help="tokens of one request (--context-length)")
    parser.add_argument("--concurrency", type=int, default=64, help="requests at a time (--max-running-requests)")
    parser.add_argument("--chunk", type=int, help="--chunked-prefill-size (default: the host's for the GPU)")
    parser.add_argument("--swa-prefix-tails", type=int, help="as given to the server (default: 4 per request)")
    parser.add_argument("--disable-radix-cache", action="store_true", help="as given to the server")
    parser.add_argument("--mem-fraction", type=float, help="--mem-fraction-static (default: the host's rule)")
    parser.add_argument("--weights-gib", type=float, help="weights on one GPU, instead of the estimate")
    parser.add_argument("--engram", choices=("gpu", "host"), default="gpu", help="where the Engram tables lie")
    parser.add_argument("--kv-gib", type=float, help="the KV budget itself: available_bytes in a server's log")
    parser.add_argument("--kv-layout", choices=envs.LAYOUTS, help=f"as in {envs.KV_LAYOUT}, which is the default")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    settings, plan, folder = read_model(arguments.model)
    for name in ("tp", "context", "concurrency"):
        if getattr(arguments, name) < 1:
            raise PlanError(f"--{name} is {getattr(arguments, name)}: it must be at least 1")
    serving = Serving(
        max_running_requests=arguments.concurrency,
        context_length=arguments.context,
        chunked_prefill_size=arguments.chunk or _chunk(_total_mib(arguments)),
        radix_cache=not arguments.disable_radix_cache,
        swa_prefix_tails=arguments.swa_prefix_tails,
    )
    memory = _memory(arguments, serving, settings, plan, folder)
    mine = {"v41": CSA2, "v4": CSA2_V4}[arguments.kv_layout or envs.kv_layout()]
    report = {
        "model": str(arguments.model),
        "serving": {**asdict(serving), "tp_size": arguments.tp, "swa_prefix_tails": serving.prefix_tails},
        "memory": asdict(memory),
        "layouts": [_layout(Budget(plan, layout, serving), memory) for layout in (mine, STOCK)],
        "notes": _notes(arguments, Budget(plan, mine, serving), memory),
    }
    print(json.dumps(report, indent=1) if arguments.json else _table(report))
    return 0


def _total_mib(arguments: argparse.Namespace) -> float | None:
    if arguments.gpu_gib is not None:
        return arguments.gpu_gib * 1024
    if arguments.gpu is None:
        return None
    if arguments.gpu.lower() not in GPUS:
        raise PlanError(f"--gpu is {arguments.gpu!r}: known are {', '.join(sorted(GPUS))}; for another give --gpu-gib")
    return GPUS[arguments.gpu.lower()]


def _chunk(total_mib: float | None) -> int:
    """The host's default --chunked-prefill-size."""
    if total_mib is None or total_mib < 60 * 1024:
        return 4096
    return 8192 if total_mib < 160 * 1024 else 16384


def _memory(arguments: argparse.Namespace, serving: Serving, settings: dict, plan: LayerPlan, folder) -> Memory:
    if arguments.kv_gib is not None:
        return Memory(None, None, "not needed: the KV budget was given", None, arguments.kv_gib * GIB)
    total_mib = _total_mib(arguments)
    if total_mib is None:
        raise PlanError("no memory was given: name a --gpu, its --gpu-gib, or the KV budget itself, --kv-gib")
    total = total_mib * (1 << 20)
    if arguments.weights_gib is not None:
        weights, source = arguments.weights_gib * GIB, "given"
    else:
        found = weights_of(settings, plan, folder)
        weights, source = found.per_gpu(arguments.tp, engram_on_gpu=arguments.engram == "gpu"), found.source
    if arguments.mem_fraction is not None:
        reserve = total * (1 - arguments.mem_fraction)
    else:
        reserve = _reserve_mib(total_mib, arguments.tp, serving) * (1 << 20)
    return Memory(total, weights, source, reserve, max(total - _RUNTIME_GIB * GIB - weights - reserve, 0.0))


def _reserve_mib(total_mib: float, tp: int, serving: Serving) -> float:
    """What the host leaves for activations and graphs without --mem-fraction-static; at least 10 GiB on large GPUs."""
    reserve = 512 + 1.5 * max(serving.chunked_prefill_size, 2048) + tp / 8 * 1024
    reserve += 2 * min(serving.max_running_requests, 512)
    return max(reserve, 10 * 1024) if total_mib > 60 * 1024 else reserve


def _layout(budget: Budget, memory: Memory) -> dict[str, Any]:
    tokens, context = budget.tokens(memory.kv), budget.serving.context_length
    pages = -(-context // PAGE_TOKENS)
    return {
        "name": budget.layout.name,
        "bytes_per_token": budget.global_per_token,
        "main_kv_per_token": budget.main_kv_per_token,
        "index_k_per_token": budget.index_k_per_token,
        "bytes_per_swa_slot": budget.swa_per_slot,
        "per_request": {
            "global_kv": budget.global_per_request(context),
            "swa": budget.swa_slots_per_request * budget.swa_per_slot,
            "pending_pairs": budget.pending_per_request,
            "selection": budget.selection_per_row,
            "maxima_of_a_scan": budget.maxima_per_row,
        },
        "swa_tokens": budget.swa_slots,
        "swa_bytes": budget.swa_bytes,
        "pending_bytes": budget.pending_bytes,
        "max_total_num_tokens": tokens,
        "requests_at_context": min(tokens // (pages * PAGE_TOKENS), budget.serving.max_running_requests),
        "buffers": budget.buffers(tokens),
        "roles": [asdict(cost) for cost in budget.roles()],
    }


def _notes(arguments: argparse.Namespace, mine: Budget, memory: Memory) -> list[str]:
    notes = []
    if memory.kv == 0:
        notes.append("The weights leave no room for a cache: use more GPUs (--tp), or --engram host.")
    elif mine.tokens(memory.kv) == 0:
        notes.append("The window slots leave no room for context: fewer --concurrency or --swa-prefix-tails.")
    if memory.weights_source.startswith("estimated"):
        notes.append(
            "Weights are an estimate from the config: --weights-gib, or --kv-gib from a server's log, is exact."
        )
    return notes


def _gib(value: float | None) -> str:
    return "-" if value is None else f"{value / GIB:,.2f} GiB"


def _bytes(value: float) -> str:
    for unit, size in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= size:
            return f"{value / size:,.1f} {unit}"
    return f"{value:,.1f} B"


def _table(report: dict[str, Any]) -> str:
    mine, stock = report["layouts"]
    serving, memory = report["serving"], report["memory"]
    lines = [
        f"{report['model']}: {serving['max_running_requests']} requests of {serving['context_length']:,} tokens, "
        f"tp {serving['tp_size']}, chunks of {serving['chunked_prefill_size']:,}",
        f"one GPU: {_gib(memory['total'])}, weights {_gib(memory['weights'])} ({memory['weights_source']}), "
        f"activations and graphs {_gib(memory['reserve'])}, KV budget {_gib(memory['kv'])}",
        "",
        f"{'':38}{'csa2':>16}{'stock dsv4':>16}",
    ]

    def row(label: str, read, form=_bytes) -> None:
        lines.append(f"{label:38}{form(read(mine)):>16}{form(read(stock)):>16}")

    count = "{:,}".format
    row("global KV per token", lambda layout: layout["bytes_per_token"], "{:,.1f} B".format)
    row("  main KV", lambda layout: layout["main_kv_per_token"], "{:,.1f} B".format)
    row("  index K", lambda layout: layout["index_k_per_token"], "{:,.1f} B".format)
    row("window KV per slot, all layers", lambda layout: layout["bytes_per_swa_slot"])
    row("one request: global KV", lambda layout: layout["per_request"]["global_kv"])
    row("  window KV while running", lambda layout: layout["per_request"]["swa"])
    row("  pending pairs", lambda layout: layout["per_request"]["pending_pairs"])
    row("  selection, per query row", lambda layout: layout["per_request"]["selection"])
    row("  maxima of one full scan, per row", lambda layout: layout["per_request"]["maxima_of_a_scan"])
    row("window slots (swa_tokens)", lambda layout: layout["swa_tokens"], count)
    row("  their bytes", lambda layout: layout["swa_bytes"])
    row("tokens that fit (max_total_num_tokens)", lambda layout: layout["max_total_num_tokens"], count)
    row("whole contexts that fit at a time", lambda layout: layout["requests_at_context"], count)
    lines += ["", "csa2 by role, all layers of a role together:", ""]
    columns = ("main KV", "index K", "window", "pending", "selection")
    lines.append(f"{'role':10}{'ratio':>6}{'layers':>8}" + "".join(f"{name:>14}" for name in columns))
    for cost in mine["roles"]:
        lines.append(
            f"{cost['role']:10}{cost['ratio'] or '-':>6}{len(cost['layers']):>8}{cost['main_kv_per_token']:>9,.1f} B/tk"
            f"{cost['index_k_per_token']:>9,.1f} B/tk{cost['swa_per_slot']:>7,.0f} B/slot"
            f"{cost['pending_per_request']:>8,} B/req{cost['selection_per_row']:>8,} B/row"
        )
    return "\n".join([*lines, "", *report["notes"]]).rstrip()
