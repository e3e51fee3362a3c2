"""The triton route of the backend in Triton's interpreter, on the CPU: a prompt and decode steps in fixed shapes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from served import environment

TESTS = Path(__file__).parents[1]
# The kernel tests' conftest mends the interpreter's bf16 casts and products.
RUN = """
import importlib.util, sys
tests = sys.argv[1]
sys.path[:0] = [tests, tests + "/host"]
spec = importlib.util.spec_from_file_location("interpreter_mends", tests + "/kernels/conftest.py")
spec.loader.exec_module(importlib.util.module_from_spec(spec))
import torch
from harness import Bench, Request, expected, relative_error
from sglang_csa2.indexer_cuda import CudaIndexer
from sglang_csa2.ops import TritonOps

bench = Bench(pages=4)
bench.backend.ops = bench.pool._ops = TritonOps("triton", "packed records")
bench.backend.indexer = CudaIndexer(bench.plan)
bench.backend.indexer.warm_up(1024, torch.device("cpu"))
request = Request.draw(16, seed=1, slot=3)
bench.forward([(request, 11)])
bench.backend.device_type = "cuda"  # decode as on a GPU
for _ in range(2):
    bench.forward([(request, 1)], "DECODE")
assert bench.backend.forward_metadata.groups is None
wanted = expected(bench, request, score_dtype=torch.float32)
for layer_id, out in wanted.outputs.items():
    error = relative_error(bench.output(request, layer_id), out)
    assert error < 5e-3, (layer_id, error)
print("ROUTE HELD")
"""


def test_the_triton_route_interpreted():
    command = [sys.executable, "-c", RUN, str(TESTS)]
    run = subprocess.run(command, env=environment(TRITON_INTERPRET="1"), capture_output=True, text=True, timeout=600)
    assert run.returncode == 0 and "ROUTE HELD" in run.stdout, run.stderr[-3000:]
