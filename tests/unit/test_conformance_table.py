"""docs/conformance.md names tests that exist, and every conformance test's links."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
TABLE = (REPOSITORY / "docs" / "conformance.md").read_text()
FOLDER = REPOSITORY / "tests" / "conformance"


def test_every_test_named_exists():
    path = None
    named = re.findall(r"`(?:([\w/]+\.py))?(?:::(\w+)(?:\[[^`]*)?)?`", TABLE)
    found = 0
    for file, name in named:
        if file and file.startswith("test_"):
            path = FOLDER / file
        elif file:
            path = REPOSITORY / file
        if not (file or name):
            continue
        assert path.exists(), path
        if name:
            assert re.search(rf"^def {name}\b", path.read_text(), re.MULTILINE), f"{path}::{name}"
            found += 1
    assert found > 25


def test_every_link_of_a_docstring_is_in_the_table():
    for path in FOLDER.glob("test_*.py"):
        for link in re.findall(r"https://github\.com/\S+/(?:issues|pull)/\d+", path.read_text()):
            assert link in TABLE, f"{path.name}: {link}"
