"""Links lead somewhere, and what the README says to type is what the programs take."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from served import REPOSITORY

from sglang_csa2.__main__ import main

DOCUMENTS = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md"), *REPOSITORY.glob("tests/golden/*.md")])
README = (REPOSITORY / "README.md").read_text()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_links(path):
    text = path.read_text()
    headings = {
        re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-") for line in re.findall(r"^#+(.*)$", text, re.M)
    }
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in headings, target
        elif "://" not in target:
            assert (path.parent / target.partition("#")[0]).exists(), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_files_that_are_named(path):
    named = re.findall(
        r"(?:python3? |`|^    )((?:scripts|examples|tests|docs|configs)/[\w./-]+\.\w+)", path.read_text(), re.M
    )
    for name in named:
        assert (REPOSITORY / name).exists(), name


COMMANDS = [line.strip() for line in README.splitlines() if line.startswith("    python -m sglang_csa2 ")]


@pytest.mark.parametrize("line", [line for line in COMMANDS if not re.search(" verify | doctor|--trace", line)])
def test_commands_that_need_nothing(line, tmp_path, monkeypatch, capsys):
    """As they stand, from the repository; files that they write go elsewhere."""
    monkeypatch.chdir(REPOSITORY)
    words = [str(tmp_path / word) if word.endswith(".svg") else word for word in shlex.split(line)[3:]]
    assert main(words) == 0 and capsys.readouterr().out


def test_commands_are_listed():
    kinds = {shlex.split(line)[3] for line in COMMANDS}
    assert len(COMMANDS) >= 6 and kinds == {"doctor", "plan", "show", "verify"}


def test_environment_variables_are_documented():
    from sglang_csa2 import envs

    names = [value for name, value in vars(envs).items() if name.isupper() and str(value).startswith("SGLANG_")]
    assert len(names) == 6
    for name in names:
        assert f"| `{name}` |" in README and Path(envs.__file__).read_text().count(f"`{name}`") == 1


def test_the_readme_has_every_route():
    from sglang_csa2.routes import ROUTES

    for route in ROUTES:
        layouts = ", ".join(f"`{layout}`" for layout in route.layouts)
        run = "yes" if route.was_run else "**not run on hardware**"
        row = f"| {route.op} | {route.name} | {route.hardware} | {route.library} | {layouts} | {route.chosen} | {run} |"
        assert row in README, row
