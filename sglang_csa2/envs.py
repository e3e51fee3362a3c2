"""The environment variables of csa2, read once where they matter.

| variable            | values | default | meaning                                                              |
|---------------------|--------|---------|----------------------------------------------------------------------|
| `SGLANG_CSA2_CHECK` | 0, 1   | 0       | 1: every forward checks the pool's invariants (checks.py); for tests |
"""

from __future__ import annotations

import os


def check_enabled() -> bool:
    """Whether the pool's invariants are checked.

    Raises:
        ValueError: the variable holds something else than 0 or 1.
    """
    value = os.environ.get("SGLANG_CSA2_CHECK", "0")
    if value not in ("0", "1"):
        raise ValueError(f"SGLANG_CSA2_CHECK is {value!r}: it must be 0 or 1; unset it or set one of these")
    return value == "1"
