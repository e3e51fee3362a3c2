"""The table of routes: which kernels may do an operation, on what hardware, and which one is chosen at start.

A route's `missing` says why it cannot serve a machine, or None. `choose` takes, per operation, the first route of the
table that the flags ask for and the machine has; what the flags ask for and the machine lacks is a `RouteError`. A
choice is made once: nothing falls back later. `python -m sglang_csa2 doctor` prints the table for the machine at hand.

To add a route, add its row to `ROUTES` above the ones that it wins against, and let `ops` or `indexer` take its name.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sglang_csa2 import envs
from sglang_csa2.config import Csa2Config
from sglang_csa2.kernels import cuda_build, deep_gemm_scores, flash_mla_decode, flash_mla_prefill

DECODE, PREFILL = "attention, decode", "attention, prefill"
SCAN, CANDIDATES, TOPK = "index scan", "index candidates", "top-k"
STORES = "stores"

# What `auto` prefers for attention over packed records, by KV layout: the first that the machine has. The last of a
# layout is the one that every card it is served on has.
AUTO_DECODE_ATTENTION = {"v41": ("cuda", "triton"), "v4": ("flashmla",)}


class RouteError(RuntimeError):
    """An operation that no route serves here, or not the one that was asked for."""


@dataclass(frozen=True)
class Machine:
    """device: "cpu" or "cuda"; capability: 90 for compute capability 9.0, 0 without a card; name: for people."""

    device: str
    capability: int
    name: str

    @classmethod
    def here(cls, device: str) -> Machine:
        if device != "cuda":
            return cls(device, 0, device.upper())
        if not torch.cuda.is_available():
            return cls(device, 0, "no CUDA device")
        major, minor = torch.cuda.get_device_capability()
        return cls(device, 10 * major + minor, torch.cuda.get_device_name())


@dataclass(frozen=True)
class Flags:
    """What the user may ask for (envs.py)."""

    layout: str = "v41"
    decode_attention: str = "auto"
    deep_gemm: bool = False

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Flags:
        """Raises envs.EnvError on a value that a flag does not take."""
        return cls(envs.kv_layout(env), envs.decode_attention(env), envs.deep_gemm_indexer(env))


@dataclass(frozen=True)
class Route:
    """One way to do an operation.

    name: what the flags and the log call it. hardware, library: what it needs, for people.
    layouts: KV layouts that it reads or writes. chosen: when. brings: what it would bring where it is missing.
    missing: why a machine does not have it for a layout, or None.
    model_problem: why it cannot serve a model, or None.
    was_run: whether this project has run it in its present form on its hardware.
    """

    op: str
    name: str
    hardware: str
    library: str
    layouts: tuple[str, ...]
    chosen: str
    brings: str
    missing: Callable[[Machine, str], str | None]
    model_problem: Callable[[Csa2Config], str | None] = lambda config: None
    was_run: bool = True

    def problem(self, machine: Machine, layout: str) -> str | None:
        """Why it cannot serve a layout on a machine, or None."""
        if layout not in self.layouts:
            return f"it reads {' and '.join(self.layouts)} records, not {layout}"
        return self.missing(machine, layout)


@dataclass(frozen=True)
class Choice:
    route: Route
    reason: str

    def __str__(self) -> str:
        version = library_version(self.route.library)
        return f"{self.route.name} ({self.route.library}{' ' + version if version else ''}): {self.reason}"


def library_version(library: str) -> str | None:
    """Installed version of a library of the table; None for our own kernels and for what is not installed."""
    try:
        return importlib.metadata.version(library)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None


def _cpu(machine: Machine, layout: str) -> str | None:
    del layout
    return None if machine.device == "cpu" else "the torch forms serve the CPU only: GPUs have kernels"


def _triton(machine: Machine, layout: str) -> str | None:
    del layout
    if machine.device != "cuda" or not machine.capability:
        return "no CUDA device" if machine.device == "cuda" else f"Triton kernels are for GPUs, not {machine.device}"
    if machine.capability < 80:
        return f"the Triton kernels need compute capability 8.0, this card has {machine.capability / 10:.1f}"
    return None if importlib.util.find_spec("triton") else "the package triton is not installed"


def _on_gpu(missing: Callable[[int, str], str | None]) -> Callable[[Machine, str], str | None]:
    def asked(machine: Machine, layout: str) -> str | None:
        if machine.device != "cuda" or not machine.capability:
            return "no CUDA device" if machine.device == "cuda" else f"it is for GPUs, not {machine.device}"
        return missing(machine.capability, layout)

    return asked


def _cuda_index_problem(config: Csa2Config) -> str | None:
    # Here and not at the top: a machine without a GPU need not have Triton.
    from sglang_csa2.indexer_cuda import cuda_problem

    return cuda_problem(config)


_CUDA = _on_gpu(lambda capability, layout: cuda_build.missing(capability))
_FLASH_MLA = _on_gpu(flash_mla_decode.missing)
_FLASH_MLA_PREFILL = _on_gpu(lambda capability, layout: flash_mla_prefill.missing(capability))
_DEEP_GEMM = _on_gpu(lambda capability, layout: deep_gemm_scores.missing(capability))

_OURS, _BOTH = "ours", ("v41", "v4")
_CARD, _HOPPER = "compute capability 8.0 and later", "9.0 with nvcc"
_DEEP_GEMM_FLAG = f"{envs.DEEP_GEMM_INDEXER}=1"

# Per operation in the order of preference.
ROUTES = (
    Route(
        DECODE,
        "cuda",
        _HOPPER,
        _OURS,
        ("v41",),
        "auto with v41 on Hopper, =cuda",
        "decode attention in CUDA C++ for Hopper",
        _CUDA,
    ),
    Route(
        DECODE,
        "triton",
        _CARD,
        "triton",
        ("v41",),
        "auto with v41 elsewhere, =triton",
        "decode attention on any recent card",
        _triton,
    ),
    Route(
        DECODE,
        "flashmla",
        "9.0, 10.0, 10.3",
        "sgl-flash-mla",
        ("v4",),
        "v4",
        "the V4 layout: FlashMLA's older decode kernels",
        _FLASH_MLA,
    ),
    Route(
        DECODE,
        "flashmla",
        "10.0, 10.3",
        "sgl-flash-mla",
        ("v41",),
        f"{envs.DECODE_ATTENTION}=flashmla with v41",
        "FlashMLA's kernels of 2026.09.30 on csa2's own records",
        _FLASH_MLA,
        was_run=False,
    ),
    Route(DECODE, "torch", "CPU", "torch", _BOTH, "on the CPU", "serving without a GPU", _cpu),
    Route(
        PREFILL,
        "flash_mla_sparse_fwd",
        "9.0, 10.0, 10.3",
        "sgl-flash-mla",
        _BOTH,
        "256 rows or more, their context within 2 GiB",
        "prefill over a gathered bf16 workspace",
        _FLASH_MLA_PREFILL,
    ),
    Route(
        PREFILL,
        "packed records",
        _CARD,
        _OURS,
        _BOTH,
        "otherwise: as in a decode",
        "prefill without FlashMLA, slower",
        _triton,
    ),
    Route(PREFILL, "torch", "CPU", "torch", _BOTH, "on the CPU", "serving without a GPU", _cpu),
    *(
        row
        for op, bring in (
            (SCAN, "Full layers' scores from DeepGEMM"),
            (CANDIDATES, "Reindex layers' scores from DeepGEMM"),
        )
        for row in (
            Route(
                op,
                "deep_gemm",
                "10.0, 10.3",
                "sgl-deep-gemm",
                _BOTH,
                _DEEP_GEMM_FLAG,
                bring,
                _DEEP_GEMM,
                was_run=False,
            ),
            Route(
                op,
                "cuda",
                _HOPPER,
                _OURS,
                _BOTH,
                "on Hopper",
                "index scores in CUDA C++ for Hopper",
                _CUDA,
                _cuda_index_problem,
            ),
            Route(op, "triton", _CARD, "triton", _BOTH, "on other GPUs", "index scores on any recent card", _triton),
            Route(op, "torch", "CPU", "torch", _BOTH, "on the CPU", "serving without a GPU", _cpu),
        )
    ),
    Route(
        TOPK,
        "cuda",
        _HOPPER,
        _OURS,
        _BOTH,
        "on Hopper",
        "selection in CUDA C++ for Hopper",
        _CUDA,
        _cuda_index_problem,
    ),
    Route(TOPK, "triton", _CARD, "triton", _BOTH, "on other GPUs", "selection on any recent card", _triton),
    Route(TOPK, "torch", "CPU", "torch", _BOTH, "on the CPU", "serving without a GPU", _cpu),
    Route(STORES, "triton", _CARD, "triton", _BOTH, "on a GPU", "fused stores on any recent card", _triton),
    Route(STORES, "torch", "CPU", "torch", _BOTH, "on the CPU", "serving without a GPU", _cpu),
)
OPERATIONS = tuple(dict.fromkeys(route.op for route in ROUTES))
# How the files of `kernels` are named, by the route that they belong to; the torch forms have no such beginning.
_FILES = {
    "cuda_": "cuda",
    "triton_": "triton",
    "deep_gemm_": "deep_gemm",
    "flash_mla_decode": "flashmla",
    "flash_mla_prefill": "flash_mla_sparse_fwd",
}


@functools.cache
def route_of(kernel: Any) -> str:
    """The route that a kernel belongs to: a module of `kernels` or a function of one; a stranger's module otherwise."""
    module: str = getattr(kernel, "__module__", None) or getattr(kernel, "__name__", None) or "?"
    package, _, file = module.rpartition(".")
    if package != cuda_build.__package__:
        return module
    return next((route for beginning, route in _FILES.items() if file.startswith(beginning)), "torch")


def problems(machine: Machine, flags: Flags) -> list[str]:
    """What stands against serving these flags on this machine, one text each; empty if nothing does."""
    if machine.device not in ("cpu", "cuda"):
        return [f"csa2 has no kernels for device {machine.device!r}; it serves cpu and cuda"]
    found = [layout_problem(machine, flags), decode_problem(machine, flags), indexer_problem(machine, flags)]
    texts = [text for text in found if text]
    for op in OPERATIONS:
        tried = [route for route in ROUTES if route.op == op and flags.layout in route.layouts]
        reasons = [route.problem(machine, flags.layout) for route in tried]
        if all(reasons) and not texts:
            texts.append(
                f"{op}: " + "; ".join(f"{route.name}: {why}" for route, why in zip(tried, reasons, strict=True))
            )
    return texts


def layout_problem(machine: Machine, flags: Flags) -> str | None:
    """Why the V4 layout cannot be served: on a GPU one route alone reads it."""
    if flags.layout != "v4" or machine.device == "cpu":
        return None
    (reader,) = (route for route in ROUTES if route.op == DECODE and route.name == "flashmla" and "v4" in route.layouts)
    why = reader.problem(machine, "v4")
    return f"{envs.KV_LAYOUT}=v4 ({why})" if why else None


def decode_problem(machine: Machine, flags: Flags) -> str | None:
    """Why the named route of attention over packed records does not serve here."""
    if flags.decode_attention == "auto":
        return None
    whys = [
        route.problem(machine, flags.layout)
        for route in ROUTES
        if route.op == DECODE and route.name == flags.decode_attention
    ]
    if None in whys:
        return None
    # Of two routes of one name the one for this layout has the reason that matters.
    why = next((text for text in whys if text and not text.startswith("it reads")), whys[0])
    return f"{envs.DECODE_ATTENTION}={flags.decode_attention} with {envs.KV_LAYOUT}={flags.layout} ({why})"


def indexer_problem(machine: Machine, flags: Flags) -> str | None:
    why = _DEEP_GEMM(machine, flags.layout) if flags.deep_gemm else None
    return f"{_DEEP_GEMM_FLAG} ({why})" if why else None


def choose(machine: Machine, flags: Flags, config: Csa2Config | None = None) -> dict[str, Choice]:
    """The route of every operation, with the reason. config: the model's, whose sizes a route may not serve.

    Raises:
        RouteError: the flags cannot be served on this machine, or an operation has no route there.
    """
    if found := problems(machine, flags):
        raise RouteError("csa2 cannot serve here: " + "; ".join(found))
    return {op: _choice(op, machine, flags, config) for op in OPERATIONS}


def _choice(op: str, machine: Machine, flags: Flags, config: Csa2Config | None) -> Choice:
    """The first of the rows that the flags ask for which serves; why those before it do not goes into the reason."""
    if machine.device == "cpu":
        return Choice(
            next(route for route in ROUTES if route.op == op and route.name == "torch"), "the model is on the CPU"
        )
    passed = ""
    for route in _asked_for(op, flags):
        why = route.problem(machine, flags.layout) or (route.model_problem(config) if config else None)
        if why is None:
            return Choice(route, _reason(route, machine, flags) + passed)
        passed += f"; not {route.name}: {why}"
    raise RouteError(f"csa2 cannot serve here: {op}{passed}")


def _asked_for(op: str, flags: Flags) -> list[Route]:
    """An operation's rows for the layout, in the order of preference, but for those that a flag alone brings."""
    rows = [route for route in ROUTES if route.op == op and flags.layout in route.layouts]
    if op == DECODE:
        auto = flags.decode_attention == "auto"
        names = AUTO_DECODE_ATTENTION[flags.layout] if auto else (flags.decode_attention,)
        return [route for name in names for route in rows if route.name == name]
    return [route for route in rows if flags.deep_gemm or route.name != "deep_gemm"]


def _reason(route: Route, machine: Machine, flags: Flags) -> str:
    if route.op == DECODE and flags.decode_attention != "auto":
        return f"{envs.DECODE_ATTENTION}={flags.decode_attention}"
    if route.op == DECODE:
        return f"auto with {flags.layout} on {machine.name}"
    if route.op == PREFILL or route.name == "deep_gemm":
        return route.chosen
    return f"on {machine.name}"
