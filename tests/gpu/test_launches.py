"""Kernels that csa2 launches per decoded token, by the role of the layer (docs/benchmarks.md has the table)."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import torch

pytest.importorskip("sglang", reason="the host stack is not installed: only the kernel tests run here")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from harness import Bench, Request

from sglang_csa2 import routes
from sglang_csa2.kernels import cuda_build

KERNELS = Path(cuda_build.__file__).parent
# By role and compress ratio: window store, attention; of those that choose: candidates and Top-K with slots; of those
# that scan: scan and best blocks; of those that keep a cache: main KV and index K, at ratio 2 the pairs. Triton's Top-K
# needs a launch more for the slots.
LAUNCHES = {
    ("swa_only", 0): 2,
    ("reuse", 1): 2,
    ("reuse", 2): 2,
    ("reindex", 1): 4,
    ("reindex", 2): 4,
    ("full", 1): 8,
    ("full", 2): 9,
}


def our_kernels() -> set[str]:
    """Names of every kernel in this project's sources."""
    triton = (re.findall(r"def (_\w+_kernel)\(", path.read_text()) for path in KERNELS.glob("triton_*.py"))
    cuda = (re.findall(r"\b(\w+_kernel)\(", path.read_text()) for path in KERNELS.glob("csrc/*.cu*"))
    return {name for names in (*triton, *cuda) for name in names}


def launched(run) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def is_ours(name: str, ours: set[str]) -> bool:
    return any(re.search(rf"\b{known}\b", name) for known in ours)


def test_launches_of_a_decode():
    bench, ours, seen = Bench(device="cuda"), our_kernels(), {}
    request = Request.draw(260, seed=1, slot=3)
    bench.forward([(request, 256)])
    bench.forward([(request, 1)], "DECODE")
    run_layer = bench.run_layer

    def counted(layer, data, forward_batch, **options):
        spec, out = bench.plan[layer.layer_id], []
        names = launched(lambda: out.append(run_layer(layer, data, forward_batch, **options)))
        # The tiny model's pool is smaller than its Top-K and chosen on its own; V4.1's holds the Top-K's blocks.
        apart = spec.is_candidate_source and bench.config.candidate_topk_blocks <= bench.config.index_topk
        number = Counter(is_ours(name, ours) for name in names)[True] - apart
        seen[(spec.role.value, spec.ratio)] = number, names
        return out[0]

    bench.run_layer = counted
    bench.forward([(request, 1)], "DECODE")
    slots = bench.backend.routes[routes.TOPK].route.name == "triton"
    for (role, ratio), (number, names) in seen.items():
        print(f"{role} at ratio {ratio}: {number} of csa2's kernels, {len(names) - number} of host and harness")
        assert number == LAUNCHES[role, ratio] + (slots and role in ("full", "reindex")), names
    assert {"full", "reuse", "reindex"} <= {role for role, _ in seen}
