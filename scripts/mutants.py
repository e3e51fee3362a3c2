"""Small faults in pool, selection, metadata, metrics, checks and kernels, each of which some fast test must catch.

    python scripts/mutants.py [--only NAME ...] [--write]      --write puts what was run into tests/mutants.md

Each mutant is one replacement in a copy of the package, run in a folder of its own with its test. First every test
named here must pass on a copy without a fault. Exit status 1 if a test does not, or a mutant survives.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mutant import Mutant
from mutant_list import MUTANTS as CORE_MUTANTS
from mutant_list_more import CHECK_MUTANTS, KERNEL_MUTANTS

REPOSITORY = Path(__file__).parents[1]
TABLE = REPOSITORY / "tests" / "mutants.md"
MUTANTS = CORE_MUTANTS + CHECK_MUTANTS + KERNEL_MUTANTS


def copy_package(folder: Path, mutant: Mutant | None = None) -> None:
    """The package as it installs, with a fault; tests and what they read are links to this checkout."""
    shutil.copytree(REPOSITORY / "sglang_csa2", folder / "sglang_csa2", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("kernels", "patches"):
        shutil.copytree(REPOSITORY / name, folder / "sglang_csa2" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("tests", "scripts", "configs", "pyproject.toml"):
        (folder / name).symlink_to(REPOSITORY / name)
    if mutant is not None:
        path = folder / installed(mutant.path)
        path.write_text(mutated(path.read_text(), mutant))


def installed(path: str) -> str:
    return path if path.startswith("sglang_csa2/") else f"sglang_csa2/{path}"


def mutated(text: str, mutant: Mutant) -> str:
    """The file's text with the fault.

    Raises:
        ValueError: the place is not there, or there more than once.
    """
    if (count := text.count(mutant.old)) != 1:
        raise ValueError(f"mutant {mutant.name!r}: {mutant.path} holds its text {count} times, not once; update it")
    return text.replace(mutant.old, mutant.new)


def failed_tests(folder: Path, *tests: str) -> list[str] | None:
    """Names of the tests that failed in a copy; None if pytest could not run them."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "--tb=no", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(folder)}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if run.returncode < 0:
        # An emulated kernel wrote where nothing is.
        return [f"{tests[0]}, by signal {-run.returncode}"]
    # An error before a test, in a build or an import, is no test's catch.
    failed = re.findall(r"^FAILED (\S+)", run.stdout, re.MULTILINE)
    if run.returncode not in (0, 1) or (run.returncode == 1 and not failed):
        print(run.stdout[-2000:], run.stderr[-2000:])
        return None
    return failed


def write_table(lines: dict[str, str]) -> None:
    """The table with these rows, by name; of mutants that were not run the rows that it had."""
    old = {
        row.split(" | ")[0].removeprefix("| "): row for row in TABLE.read_text().splitlines() if row.startswith("| ")
    }
    rows = [row for mutant in MUTANTS if (row := lines.get(mutant.name) or old.get(mutant.name))]
    head = "# Mutants\n\nWritten by `scripts/mutants.py --write`: each fault alone, and the test that failed on it.\n"
    TABLE.write_text("\n".join([head, "| fault | file | caught by |", "|---|---|---|", *rows]) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="names of mutants")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.relative_to(REPOSITORY)}")
    arguments = parser.parse_args()
    mutants = [m for m in MUTANTS if not arguments.only or m.name in arguments.only]
    with tempfile.TemporaryDirectory() as folder:
        copy_package(Path(folder))
        if (failed := failed_tests(Path(folder), *sorted({m.test for m in mutants}))) != []:
            print(f"without a fault these fail: {failed}")
            return 1
    survivors, lines = [], {}
    for mutant in mutants:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            copy_package(Path(folder), mutant)
            failed = failed_tests(Path(folder), mutant.test)
        caught = failed[0] if failed else None
        print(f"{'caught' if caught else 'SURVIVED':8} {mutant.name} ({time.monotonic() - start:.0f} s)", flush=True)
        if caught is None:
            survivors.append(mutant.name)
        lines[mutant.name] = f"| {mutant.name} | `{mutant.path}` | `{caught or 'none'}` |"
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} mutants caught")
    if arguments.write:
        write_table(lines)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
