"""One fault, for the lists of scripts/mutants.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """`old` occurs once in `path`; `test` is pytest's name of what must fail."""

    name: str
    path: str
    old: str
    new: str
    test: str
