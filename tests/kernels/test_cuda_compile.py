"""The CUDA C++ kernels compile for sm_90a with nvcc, without a GPU: no spills, warpgroup instructions kept apart."""

import re
import subprocess

import pytest

from sglang_csa2.kernels import cuda_sparse_attention as attention


def _nvcc():
    try:
        return attention.find_nvcc()
    except RuntimeError:
        return None


needs_nvcc = pytest.mark.skipif(_nvcc() is None, reason="needs nvcc: none in CUDA_HOME, /usr/local/cuda or PATH")


@needs_nvcc
def test_compile(tmp_path, record_property):
    command = [_nvcc(), *attention.NVCC_FLAGS, "-cubin", "-Xptxas", "-v", "-o", str(tmp_path / "kernel.cubin")]
    result = subprocess.run([*command, str(attention.SOURCE)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    print(result.stderr)
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", result.stderr)
    assert len(spills) == 2
    assert set(spills) == {("0", "0", "0")}
    # ptxas says so when it waits between warpgroup products (C7510 and on) or ignores a register hand-over (C7508).
    assert "(C75" not in result.stderr
    assert "warning" not in result.stderr
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", result.stderr)]
    record_property("registers", registers)
    assert max(registers) * 512 <= 65536


@needs_nvcc
def test_build_once(tmp_path):
    library = attention.build(tmp_path)
    stamp = library.stat().st_mtime_ns
    assert attention.build(tmp_path) == library
    assert library.stat().st_mtime_ns == stamp
    assert [path.name for path in tmp_path.iterdir()] == [library.name]


def test_missing_nvcc_names_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(attention.shutil, "which", lambda *args, **options: None)
    with pytest.raises(RuntimeError, match="install the CUDA toolkit"):
        attention.build(tmp_path)
