"""The environment variables that csa2 reads, typed, in one place.

| variable                                   | value           | effect                                        |
|--------------------------------------------|-----------------|-----------------------------------------------|
| `SGLANG_CSA2_KV_LAYOUT`                    | `v41`, `v4`     | records of window and main KV (layout.py)     |
| `SGLANG_CSA2_DECODE_ATTENTION`             | `auto`, a route | attention over packed records (routes.py)     |
| `SGLANG_DSV41_DEEP_GEMM_CANDIDATE_INDEXER` | switch, off     | index scores through DeepGEMM, on SM100       |
| `SGLANG_OPT_DSV41_PREFILL_KV_REUSE`        | switch, on      | layers share what a prefill gathered          |
| `SGLANG_CSA2_CHECK`                        | switch, off     | every forward checks the pool (checks.py)     |
| `SGLANG_CSA2_TRACE`                        | a folder        | eager forwards write their choices (trace.py) |
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_TRUE, _FALSE = ("1", "true", "yes", "y", "on"), ("0", "false", "no", "n", "off", "")

KV_LAYOUT = "SGLANG_CSA2_KV_LAYOUT"
DECODE_ATTENTION = "SGLANG_CSA2_DECODE_ATTENTION"
DEEP_GEMM_INDEXER = "SGLANG_DSV41_DEEP_GEMM_CANDIDATE_INDEXER"
PREFILL_KV_REUSE = "SGLANG_OPT_DSV41_PREFILL_KV_REUSE"
CHECK = "SGLANG_CSA2_CHECK"
TRACE = "SGLANG_CSA2_TRACE"

# The values that the two choices take; the first is the default.
LAYOUTS = ("v41", "v4")
DECODE_ATTENTIONS = ("auto", "cuda", "triton", "flashmla")


class EnvError(ValueError):
    """A variable holds what it may not."""


def flag(name: str, default: bool, env: Mapping[str, str] = os.environ) -> bool:
    """A switch.

    Raises:
        EnvError: the value is neither a yes nor a no.
    """
    value = env.get(name)
    if value is None:
        return default
    if value.strip().lower() in _TRUE:
        return True
    if value.strip().lower() in _FALSE:
        return False
    raise EnvError(f"{name} is {value!r}, a switch: give {'/'.join(_TRUE)} or {'/'.join(filter(None, _FALSE))}")


def choice(name: str, values: tuple[str, ...], env: Mapping[str, str] = os.environ) -> str:
    """One of `values`; the first where the variable is unset or empty.

    Raises:
        EnvError: the value is another.
    """
    value = env.get(name, "").strip().lower() or values[0]
    if value not in values:
        raise EnvError(f"{name} is {env[name]!r}: give {' or '.join(values)}, or unset it for {values[0]}")
    return value


def kv_layout(env: Mapping[str, str] = os.environ) -> str:
    """Name of the KV layout, a key of `layout.KV_LAYOUTS`."""
    return choice(KV_LAYOUT, LAYOUTS, env)


def decode_attention(env: Mapping[str, str] = os.environ) -> str:
    """`auto`, or the name of the route of attention over packed records."""
    return choice(DECODE_ATTENTION, DECODE_ATTENTIONS, env)


def deep_gemm_indexer(env: Mapping[str, str] = os.environ) -> bool:
    """Whether index layers score through DeepGEMM."""
    return flag(DEEP_GEMM_INDEXER, False, env)


def prefill_kv_reuse(env: Mapping[str, str] = os.environ) -> bool:
    """Whether layers of one kv_source share the gathered main KV, and those of one index_source the index table."""
    return flag(PREFILL_KV_REUSE, True, env)


def check_enabled(env: Mapping[str, str] = os.environ) -> bool:
    """Whether the pool's invariants are checked."""
    return flag(CHECK, False, env)


def trace_folder(env: Mapping[str, str] = os.environ) -> Path | None:
    """Where to write traces; None, the default, for not at all."""
    value = env.get(TRACE, "")
    return Path(value) if value else None
