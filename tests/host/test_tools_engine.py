"""The examples and the command that bring their own engine; a file of its own, so that no server runs beside them."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from served import TINY, environment, example

pytestmark = pytest.mark.server


def test_offline_engine(tiny_model):
    out = example("offline_engine.py")
    assert re.findall(r"^ +(\d+) tokens", out, re.MULTILINE) == ["3", "14", "901"]


def test_needle(tiny_model, tmp_path):
    picture = tmp_path / "needle.png"
    out = example("needle.py", "--tokens", "600", "--out", str(picture))
    assert "the needle at 233 to 240" in out and picture.exists()
    assert re.findall(r"layer (\d+): \d of the needle's (\d)", out) == [("2", "5"), ("5", "8"), ("7", "8"), ("9", "8")]


def test_verify_with_selections(tiny_model):
    """Log-probabilities and every index layer's entries; the engine's own noise stays out of stdout."""
    command = [sys.executable, "-m", "sglang_csa2", "verify", "--model", str(TINY), "--lengths", "3", "300"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    lines = run.stdout.splitlines()
    assert [line.split("  ")[1].strip() for line in lines[:-1]] == [
        "against the plain model, prompt of 3",
        "against the plain model, prompt of 300",
        *(f"selection of layer {layer}" for layer in (2, 5, 7, 9)),
    ]
    assert all(line.startswith("pass") for line in lines[:-1]) and lines[-1] == "PASS"
