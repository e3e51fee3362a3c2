"""The CUDA C++ kernels compile for sm_90a with nvcc, without a GPU: no spills, warpgroup instructions kept apart."""

import functools
import re
import subprocess
from pathlib import Path

import pytest
import triton

from sglang_csa2.kernels import cuda_build

SOURCES = sorted(cuda_build.SOURCES.glob("*.cu"))
# Those whose kernels start while the one before them ends.
EARLY = [source for source in SOURCES if "int early" in source.read_text()]
# Instructions that touch global memory, bulk copies among them.
GLOBAL = re.compile(r"\b(LDG|LDGSTS|STG|LD|ST|ATOMG?|REDG?|UBLKCP|UTMA\w*)\b")
DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def _nvcc():
    try:
        return cuda_build.find_nvcc()
    except RuntimeError:
        return None


needs_nvcc = pytest.mark.skipif(_nvcc() is None, reason="needs nvcc: none in CUDA_HOME, /usr/local/cuda or PATH")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Compiles a source, once: its cubin and what ptxas says."""
    folder = tmp_path_factory.mktemp("cubins")

    @functools.cache
    def compile_source(source):
        cubin = folder / f"{source.stem}.cubin"
        command = [_nvcc(), *cuda_build.NVCC_FLAGS, "-cubin", "-Xptxas", "-v", "-o", str(cubin), str(source)]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return cubin, result.stderr

    return compile_source


@needs_nvcc
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_compile(source, compiled, record_property):
    _, said = compiled(source)
    print(said)
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert spills
    assert set(spills) == {("0", "0", "0")}
    # ptxas says so when it waits between warpgroup products (C7510 and on) or ignores a register hand-over (C7508).
    assert "(C75" not in said
    assert "warning" not in said
    record_property("registers", [int(count) for count in re.findall(r"Used (\d+) registers", said)])


def before_the_wait(assembly: str) -> dict[str, list[str]]:
    """By kernel, what touches global memory before the wait for the kernel before (ACQBULK)."""
    found = {}
    for kernel in assembly.split("Function : ")[1:]:
        name, *lines = kernel.splitlines()
        waits = next((i for i, line in enumerate(lines) if "ACQBULK" in line), None)
        assert waits is not None, f"{name} does not wait for the kernel before it"
        found[name] = [line for line in lines[:waits] if GLOBAL.search(line)]
    return found


def test_some_kernels_start_early():
    assert EARLY


@needs_nvcc
@pytest.mark.skipif(not DISASSEMBLER.exists(), reason="this Triton ships no cuobjdump")
@pytest.mark.parametrize("source", EARLY, ids=lambda path: path.stem)
def test_nothing_is_read_before_the_wait(source, compiled):
    """The assembler may move loads that are said to be read-only above it; load_global is for that."""
    cubin, _ = compiled(source)
    dump = subprocess.run([DISASSEMBLER, "-sass", cubin], check=True, capture_output=True, text=True)
    found = before_the_wait(dump.stdout)
    assert found and not any(found.values()), {name: lines for name, lines in found.items() if lines}


@needs_nvcc
def test_build_once(tmp_path):
    library = cuda_build.build(SOURCES[-1], tmp_path)
    stamp = library.stat().st_mtime_ns
    assert cuda_build.build(SOURCES[-1], tmp_path) == library
    assert library.stat().st_mtime_ns == stamp
    assert [path.name for path in tmp_path.iterdir()] == [library.name]


def test_build_all_builds_every_source(monkeypatch):
    built = []
    monkeypatch.setattr(cuda_build, "build", built.append)
    cuda_build.build_all()
    assert sorted(built) == SOURCES


def test_missing_nvcc_names_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(cuda_build.shutil, "which", lambda *args, **options: None)
    with pytest.raises(RuntimeError, match="install the CUDA toolkit"):
        cuda_build.build(SOURCES[-1], tmp_path)
