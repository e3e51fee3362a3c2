"""The environment variables that csa2 reads, typed, in one place.

| variable                            | value    | effect                                                        |
|-------------------------------------|----------|---------------------------------------------------------------|
| `SGLANG_OPT_DSV41_PREFILL_KV_REUSE` | a switch | on (default): layers share what a prefill gathered            |
| `SGLANG_CSA2_CHECK`                 | a switch | on: every forward checks the pool (checks.py); for tests      |
| `SGLANG_CSA2_TRACE`                 | a folder | eager forwards write their choices there (trace.py); slow     |
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_TRUE, _FALSE = ("1", "true", "yes", "y", "on"), ("0", "false", "no", "n", "off", "")

PREFILL_KV_REUSE = "SGLANG_OPT_DSV41_PREFILL_KV_REUSE"
CHECK = "SGLANG_CSA2_CHECK"
TRACE = "SGLANG_CSA2_TRACE"


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
