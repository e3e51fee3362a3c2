"""GPU kernel tests: skipped without a CUDA device, except the ones that compile or interpret on the CPU."""

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")

INTERPRETED = bool(triton.knobs.runtime.interpret)
_CPU_ONLY = (
    "test_compile.py", "test_cuda_compile.py", "test_cuda_emulation.py", "test_cuda_index_emulation.py",
    "test_interpret.py", "test_flash_mla_prefill.py", "test_cuda_index_decode_emulation.py",
    "test_cuda_topk_emulation.py", "test_flash_mla_decode.py", "test_deep_gemm_scores.py",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available() or INTERPRETED:
        return
    skip = pytest.mark.skip(reason="needs a CUDA device (or TRITON_INTERPRET=1)")
    for item in items:
        if item.path.parent.name == "kernels" and item.path.name not in _CPU_ONLY:
            item.add_marker(skip)


if INTERPRETED:
    from triton.runtime import interpreter

    _stock_convert = interpreter._convert_float

    def _convert_float(data, source, target, rounding_mode):
        """The interpreter's bf16 casts lose ties, carries and subnormals; torch's do not."""
        if {source.name, target.name} != {"bf16", "fp32"}:
            return _stock_convert(data, source, target, rounding_mode)
        if source.name == "bf16":
            return (data.astype(np.uint32) << 16).view(np.uint32)
        values = torch.from_numpy(np.array(data, dtype=np.float32))
        return values.bfloat16().view(torch.int16).numpy().view(np.uint16)

    interpreter._convert_float = _convert_float
    _stock_dot = interpreter.InterpreterBuilder.create_dot

    def _create_dot(self, a, b, d, *precision):
        """The interpreter multiplies bf16 tiles by their bits."""
        if a.dtype.scalar.name != "bf16":
            return _stock_dot(self, a, b, d, *precision)
        wide = ((x.data.astype(np.uint32) << 16).view(np.float32) for x in (a, b))
        return interpreter.TensorHandle(np.matmul(*wide) + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = _create_dot


@pytest.fixture
def device():
    return torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
