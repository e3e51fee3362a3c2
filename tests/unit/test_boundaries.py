"""Who may import whom, and what an installed wheel holds."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
CORE = sorted((REPOSITORY / "sglang_csa2").glob("*.py"))
TOOLS = sorted((REPOSITORY / "sglang_csa2" / "tools").glob("*.py"))
KERNELS = sorted((REPOSITORY / "kernels").glob("*.py"))
HOST_MODULES = {"plugin", "pool", "backend", "metrics"}
HOST_TOOLS = {"served"}
# Data flows one way: a module imports only those before it.
ORDER = [
    "config",
    "layer_plan",
    "layout",
    "selection",
    "metadata",
    "trace",
    "routes",
    "ops",
    "workspace",
    "indexer",
    "attention",
]


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def imports_from(path: Path, package: str) -> set[str]:
    return {name for name in imports(path) if name == package or name.startswith(package + ".")}


@pytest.mark.parametrize("path", CORE + KERNELS, ids=lambda path: path.stem)
def test_only_host_modules_import_the_host(path):
    marked = path.parent.name == "sglang_csa2" and path.stem in HOST_MODULES
    assert marked or not imports_from(path, "sglang")
    if marked:
        assert path.read_text().startswith('"""[host]')


@pytest.mark.parametrize("path", TOOLS, ids=lambda path: path.stem)
def test_only_marked_tools_import_the_host(path):
    marked = path.stem in HOST_TOOLS
    assert marked or not imports_from(path, "sglang")
    assert path.read_text().startswith('"""[host]') == marked


@pytest.mark.parametrize("path", CORE + KERNELS, ids=lambda path: path.stem)
def test_what_serves_does_not_know_the_tools(path):
    loader = path.stem == "__main__"
    assert loader or not imports_from(path, "sglang_csa2.tools") | imports_from(path, "sglang_csa2.reference_model")


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_kernels_do_not_know_the_reference(path):
    allowed = ("sglang_csa2.kernels", "sglang_csa2.layout")
    assert all(name == "sglang_csa2" or name.startswith(allowed) for name in imports_from(path, "sglang_csa2"))


@pytest.mark.parametrize("name", ORDER)
def test_data_flows_one_way(name):
    path = REPOSITORY / "sglang_csa2" / f"{name}.py"
    later = {f"sglang_csa2.{other}" for other in [*ORDER[ORDER.index(name) + 1 :], *HOST_MODULES]}
    assert not imports(path) & later


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, sglang_csa2; print([m for m in ('torch', 'sglang', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_the_wheel_holds_everything_and_installs(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*build, str(REPOSITORY)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    places = {name: name for name in ("sglang_csa2", "sglang_csa2/tools")}
    places |= {name: f"sglang_csa2/{name}" for name in ("kernels", "patches")}
    for folder, package in places.items():
        for path in (REPOSITORY / folder).glob("*.py"):
            assert f"{package}/{path.name}" in names
    assert "sglang_csa2/py.typed" in names
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import sglang_csa2.kernels.records as r; "
        "from importlib.metadata import entry_points; "
        "assert r.__file__.startswith(sys.argv[1]), r.__file__; "
        "assert any(e.name == 'csa2' for e in entry_points(group='sglang.srt.plugins'))"
    )
    subprocess.run([sys.executable, "-I", "-c", code, str(target)], check=True)


def test_lint():
    subprocess.run([sys.executable, "-m", "ruff", "check", str(REPOSITORY)], check=True)


def test_types():
    subprocess.run([sys.executable, "-m", "mypy"], cwd=REPOSITORY, check=True)
