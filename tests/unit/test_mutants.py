"""The mutants' places exist, so that the list does not rot between two runs of scripts/mutants.py."""

from __future__ import annotations

import ast
import re

import mutants
import pytest


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mutant_applies(mutant):
    text = mutants.mutated((mutants.REPOSITORY / mutant.path).read_text(), mutant)
    if mutant.path.endswith(".py"):
        ast.parse(text)
    path, name, _ = re.split(r"::|\[|$", mutant.test, maxsplit=2)
    assert re.search(rf"^def {name}\b", (mutants.REPOSITORY / path).read_text(), re.MULTILINE)


def test_the_table_lists_every_mutant():
    table = mutants.TABLE.read_text()
    assert len(mutants.MUTANTS) >= 20 and "`none`" not in table
    assert [line.split(" | ")[0][2:] for line in table.splitlines()[6:]] == [m.name for m in mutants.MUTANTS]
