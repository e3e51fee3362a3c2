"""The scripts of the README hand on what they are given, and say what they need."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def stub(tmp_path):
    """A Python that has every package, in an environment made before; it writes its arguments down."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    seen = tmp_path / "seen"
    python.write_text(f'#!/bin/sh\necho "$*" >> {seen}\ncase "$*" in *pathlib*) echo {REPOSITORY};; esac\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return tmp_path / "venv", seen


def test_serve_hands_options_to_the_server(stub):
    venv, seen = stub
    environment = os.environ | {"CSA2_VENV": str(venv), "PORT": "31234"}
    environment.pop("CSA2_PYTHON", None)
    command = ["bash", str(REPOSITORY / "scripts" / "serve.sh"), "--enable-metrics", "--served-model-name", "a b"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    launched = seen.read_text().splitlines()[-1]
    assert "sglang.launch_server" in launched and launched.endswith("--enable-metrics --served-model-name a b")
    assert "requirements/cpu.txt" in seen.read_text() and "-r --enable-metrics" not in seen.read_text()


def test_soak_without_a_server_says_so():
    command = [sys.executable, str(REPOSITORY / "scripts" / "soak.py"), "http://127.0.0.1:9"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 1
    assert "no server answers at http://127.0.0.1:9: start one, with --enable-metrics" in run.stderr


def test_soak_asks_for_metrics(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    import soak

    run = soak.Soak("http://nowhere", seed=1, vocabulary=1024)
    monkeypatch.setattr(run, "flush", lambda: None)
    monkeypatch.setattr(run, "post", lambda *request: None)
    monkeypatch.setattr(soak.requests, "get", lambda *request, **options: type("Answer", (), {"text": "Not Found"}))
    with pytest.raises(SystemExit, match="start the server with --enable-metrics"):
        run.books()


@pytest.mark.parametrize("broken", [None, "bench_prefill.py"])
def test_bench_runs_every_table_and_says_what_failed(tmp_path, broken):
    seen, python = tmp_path / "seen", tmp_path / "python"
    fails = f"*{broken}*) exit 3;; " if broken else ""
    python.write_text(f'#!/bin/sh\necho "$*" >> {seen}\ncase "$*" in {fails}esac\n')
    python.chmod(0o755)
    command = ["bash", str(REPOSITORY / "scripts" / "bench.sh"), str(tmp_path / "out")]
    run = subprocess.run(command, env=os.environ | {"PYTHON": str(python)}, capture_output=True, text=True)
    lines = seen.read_text()
    for part in ("bench_decode.py attention", "bench_decode.py layer", "bench_prefill.py memory", "bench_routes.py"):
        assert part in lines
    assert "plot_decode.py" in lines.splitlines()[-1]
    assert run.returncode == (1 if broken else 0)
    assert ("failed: prefill-scores prefill-reindex prefill-memory" in run.stderr) == bool(broken)
    assert (tmp_path / "out" / "decode-layer.log").exists()


def test_bench_needs_a_gpu_and_a_folder(tmp_path):
    command = ["bash", str(REPOSITORY / "scripts" / "bench.sh")]
    environment = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    assert subprocess.run(command, env=environment, capture_output=True).returncode == 2
    run = subprocess.run([*command, str(tmp_path / "out")], env=environment, capture_output=True, text=True)
    assert run.returncode == 1 and "no CUDA GPU is visible" in run.stderr and not (tmp_path / "out").exists()
