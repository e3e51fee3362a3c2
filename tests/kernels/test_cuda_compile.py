"""The CUDA C++ kernels compile for sm_90a with nvcc, without a GPU: no spills, warpgroup instructions kept apart."""

import re
import subprocess

import pytest

from sglang_csa2.kernels import cuda_build

SOURCES = sorted(cuda_build.SOURCES.glob("*.cu"))


def _nvcc():
    try:
        return cuda_build.find_nvcc()
    except RuntimeError:
        return None


needs_nvcc = pytest.mark.skipif(_nvcc() is None, reason="needs nvcc: none in CUDA_HOME, /usr/local/cuda or PATH")


@needs_nvcc
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_compile(source, tmp_path, record_property):
    command = [_nvcc(), *cuda_build.NVCC_FLAGS, "-cubin", "-Xptxas", "-v", "-o", str(tmp_path / "kernel.cubin")]
    result = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    print(result.stderr)
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", result.stderr)
    assert spills
    assert set(spills) == {("0", "0", "0")}
    # ptxas says so when it waits between warpgroup products (C7510 and on) or ignores a register hand-over (C7508).
    assert "(C75" not in result.stderr
    assert "warning" not in result.stderr
    record_property("registers", [int(count) for count in re.findall(r"Used (\d+) registers", result.stderr)])


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
