"""Hold other versions of SGLang against the host table: install each beside the environment, report what differs.

    python scripts/host_drift.py                    the supported versions and the newest that pip finds
    python scripts/host_drift.py 0.5.22 0.5.23      these

Each is installed without its dependencies into a folder of its own, from wherever pip is configured to look; nothing
of the environment changes and nothing of SGLang is run, since the table is checked on its source. Beside the table
it lists what the model asks of its attention backend and did not ask in the supported version: calls that csa2
may have to answer. Exits 1 if any version differs. CSA2_PIP_ARGS adds arguments to pip.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from sglang_csa2 import host  # noqa: E402  the checkout's, wherever this is started

_MODELS = ("srt/models/deepseek_v4.py", "srt/models/deepseek_v4_mhc.py")
# Runs in a process that sees the other SGLang first; host.py imports none of it.
_CHECK = "import json; from sglang_csa2 import host; print(json.dumps([host.installed_version(), host.differences()]))"


def install(version: str | None, folder: Path) -> None:
    """Put one version into `folder`, without dependencies; None is the newest.

    Raises:
        RuntimeError: pip found no such version.
    """
    wanted = "sglang" if version is None else f"sglang=={version}"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--disable-pip-version-check", "--target"]
    extra = shlex.split(os.environ.get("CSA2_PIP_ARGS", ""))
    run = subprocess.run([*command, str(folder), *extra, wanted], capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"pip cannot install {wanted}: {run.stderr.strip().splitlines()[-1]}")


def check(folder: Path) -> tuple[str, list[str]]:
    """The version in a folder and its differences from the host table."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(REPOSITORY)])}
    run = subprocess.run(
        [sys.executable, "-c", _CHECK], capture_output=True, text=True, env=environment, cwd=folder, check=True
    )
    version, found = json.loads(run.stdout)
    return version, found


def asked_of_backend(folder: Path) -> set[str]:
    """Attributes that the model takes of `get_attn_backend()` or of something named `attn_backend`."""
    names = set()
    for module in _MODELS:
        path = folder / "sglang" / module
        for node in ast.walk(ast.parse(path.read_text())) if path.exists() else ():
            if isinstance(node, ast.Attribute) and _is_backend(node.value):
                names.add(node.attr)
            # getattr(backend, "name", default)
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr" and _is_backend(node.args[0]):
                names.add(getattr(node.args[1], "value", "?"))
    return names


def _is_backend(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return getattr(node.func, "id", getattr(node.func, "attr", "")) == "get_attn_backend"
    return getattr(node, "id", getattr(node, "attr", "")) == "attn_backend"


def report(versions: list[str | None]) -> int:
    """Print the findings per version; the number of versions that differ."""
    differing, known = 0, None
    seen: set[str] = set()
    for wanted in versions:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            install(wanted, folder)
            version, found = check(folder)
            asked = asked_of_backend(folder)
        if version in seen:
            print(f"sglang {version} is the newest: see above")
            continue
        seen.add(version)
        if version in host.SUPPORTED_VERSIONS:
            known = asked
        new = sorted(asked - known) if known is not None else []
        supported = "supported" if version in host.SUPPORTED_VERSIONS else "not in SUPPORTED_VERSIONS"
        agrees = len(host.HOST_SYMBOLS) - len(found)
        print(f"sglang {version} ({supported}): {agrees} of {len(host.HOST_SYMBOLS)} symbols as in the table")
        for difference in found:
            print(f"  {difference}")
        if new:
            print(f"  the model also asks its backend for: {', '.join(new)}")
        differing += bool(found)
    return differing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", help="default: the supported versions and the newest")
    arguments = parser.parse_args()
    # Supported ones first: the others are compared with what their model asks.
    versions: list[str | None] = list(arguments.versions) or [*host.SUPPORTED_VERSIONS, None]
    versions.sort(key=lambda version: version not in host.SUPPORTED_VERSIONS)
    try:
        return int(report(versions) > 0)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
