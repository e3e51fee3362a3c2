"""The environment variables that csa2 reads, in one place.

| variable             | value    | effect                                                                            |
|----------------------|----------|-----------------------------------------------------------------------------------|
| `SGLANG_CSA2_TRACE`  | a folder | every eager forward writes there what its index layers chose (trace.py); slow     |
"""

from __future__ import annotations

import os
from pathlib import Path

TRACE = "SGLANG_CSA2_TRACE"


def trace_folder() -> Path | None:
    """Where to write traces; None, the default, for not at all."""
    value = os.environ.get(TRACE, "")
    return Path(value) if value else None
