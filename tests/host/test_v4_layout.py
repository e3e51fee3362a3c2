"""The V4 layout on the CPU: the host's pool in 584-byte records, its bytes, and what the layers compute from them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from harness import Bench, Request, expected, relative_error
from served import environment

from sglang_csa2 import envs, reference
from sglang_csa2.kernels.records_v4 import decode_v4, encode_v4, read_v4
from sglang_csa2.layout import INDEX_K, V4, global_bytes_per_token, swa_bytes_per_slot
from sglang_csa2.tools.budget import CSA2_V4, Budget, Serving

TESTS = Path(__file__).parents[1]
NOISE = 5e-3


@pytest.fixture(autouse=True)
def v4(monkeypatch):
    monkeypatch.setenv(envs.KV_LAYOUT, "v4")


def as_v4(quantize):
    return lambda x: decode_v4(encode_v4(quantize(x)))


@pytest.fixture
def rounded(monkeypatch):
    """The reference with what a V4 record loses."""
    for name in ("quantize_swa_kv", "quantize_main_kv"):
        monkeypatch.setattr(reference, name, as_v4(getattr(reference, name)))


@pytest.mark.parametrize(
    "schedule",
    [[(300, "EXTEND")], [(count, "EXTEND") for count in (7, 1, 255, 37)], [(250, "EXTEND")] + [(1, "DECODE")] * 9],
    ids=["whole", "chunks", "decoded"],
)
def test_schedules(schedule, rounded):
    bench = Bench()
    request = Request.draw(sum(count for count, _ in schedule), seed=1, slot=3)
    for count, mode in schedule:
        bench.forward([(request, count)], mode)
    for layer_id, out in expected(bench, request).outputs.items():
        assert relative_error(bench.output(request, layer_id), out) < NOISE, f"layer {layer_id}"


def test_what_the_layout_costs_a_layer():
    """Against the reference without V4's rounding: window layers almost nothing, the others under 3 %."""
    bench = Bench()
    request = Request.draw(300, seed=1, slot=3)
    bench.forward([(request, 300)])
    for layer_id, out in expected(bench, request).outputs.items():
        error = relative_error(bench.output(request, layer_id), out)
        assert error < (0.03 if bench.plan[layer_id].ratio else NOISE), f"layer {layer_id}: {error}"


def test_buffers_are_those_of_the_plan_and_of_stock():
    bench = Bench(pages=24)
    tokens = 24 * 256
    budget = Budget(bench.plan, CSA2_V4, Serving(max_running_requests=8, context_length=1024))
    window = (tokens + 256) * budget.swa_per_slot
    assert budget.buffers(tokens) | {"swa_kv": window} == bench.pool.layer_bytes()
    assert bench.pool.pd_kv_layout().startswith("v4,c1:v4")
    assert bench.pool.main_cache(5).shape[1:] == (256, 584) and bench.pool.main_cache(2).shape[1:] == (128, 584)
    assert bench.pool.swa_cache(0).stride() == (149760, 584, 1)


def test_the_hosts_budget_counts_these_bytes():
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import select_dsv4_kv_layout

    bench = Bench(pages=4)
    assert [
        layout and str(layout.value if hasattr(layout, "value") else layout) for layout in select_dsv4_kv_layout()
    ] == ["v4", None]
    sources = bench.plan.kv_sources
    assert global_bytes_per_token(bench.plan, V4) == sum((585 + INDEX_K.bytes) / source.ratio for source in sources)
    assert swa_bytes_per_slot(bench.plan, V4) == 585 * len(bench.plan.layers)


def test_window_slots_hold_the_models_grid():
    """What a slot gives back is the model's own rounding, to the bit where V4 can hold it."""
    bench = Bench(pages=4)
    request = Request.draw(40, seed=2, slot=1)
    bench.forward([(request, 40)])
    slots = bench.pool.full_to_swa_index_mapping[bench.req_to_token[1, :40].long()]
    layer = bench.layers[0]
    kv = reference.rms_norm(request.inputs[0].kv, layer.kv_weight, 1e-20)
    wanted = reference.quantize_swa_kv(reference.rotate_tail(kv, layer.freqs_cis[:40]))
    assert relative_error(read_v4(bench.pool.swa_cache(0), slots), wanted) < 1e-6


def test_checks_know_the_pages(monkeypatch):
    monkeypatch.setenv(envs.CHECK, "1")
    bench = Bench(pages=6)
    request = Request.draw(300, seed=1, slot=3)
    bench.forward([(request, 299)])
    bench.forward([(request, 1)], "DECODE")


# The GPU's operations in Triton's interpreter, FlashMLA's call played in torch.
RUN = """
import importlib.util, sys, types
tests = sys.argv[1]
sys.path[:0] = [tests, tests + "/host"]
spec = importlib.util.spec_from_file_location("interpreter_mends", tests + "/kernels/conftest.py")
spec.loader.exec_module(importlib.util.module_from_spec(spec))
import torch
from harness import Bench, Request, expected, relative_error
from sglang_csa2 import reference
from sglang_csa2.indexer_cuda import CudaIndexer
from sglang_csa2.kernels.records_v4 import decode_v4, encode_v4, read_v4
from sglang_csa2.ops import TritonOps

schedules = []

class Schedule:
    lengths = None

def flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, softmax_scale,
                           is_fp8_kvcache, indices, attn_sink, topk_length, use_legacy, extra_k_cache=None,
                           extra_indices_in_kvcache=None, extra_topk_length=None):
    assert use_legacy and q.shape[2] == 64 and indices.dtype is torch.int32 and indices.shape[-1] % 64 == 0
    live = (topk_length, extra_topk_length)
    if tile_scheduler_metadata.lengths is None:
        tile_scheduler_metadata.lengths = [None if x is None else x.clone() for x in live]
        schedules.append(tile_scheduler_metadata)
    for kept, now in zip(tile_scheduler_metadata.lengths, live):
        assert (kept is None) == (now is None) and (now is None or torch.equal(kept, now)), "a stale schedule"
    keys, listed = [], []
    for cache, places, lengths in ((k_cache, indices, topk_length),
                                   (extra_k_cache, extra_indices_in_kvcache, extra_topk_length)):
        if cache is None:
            continue
        places = places[:, 0].long()
        past = torch.arange(places.shape[1]) >= lengths[:, None]
        assert (places[past] < 0).all(), "a key lies past its row's length"
        values = read_v4(cache[:, :, 0], places.clamp(min=0).flatten()).view(*places.shape, 512)
        keys.append(values.masked_fill((places < 0)[..., None], 0)); listed.append(places >= 0)
    keys, listed = torch.cat(keys, 1), torch.cat(listed, 1)
    out = torch.empty(len(q), 1, 64, 512, dtype=torch.bfloat16)
    for row in range(len(q)):
        places = torch.arange(keys.shape[1]).masked_fill(~listed[row], -1)[None]
        out[row] = reference.sparse_attention(q[row], keys[row], places, attn_sink, softmax_scale).bfloat16()
    return out, None

sys.modules["flash_mla"] = types.SimpleNamespace(
    flash_mla_with_kvcache=flash_mla_with_kvcache, get_mla_metadata=lambda: (Schedule(), None))

for name in ("quantize_swa_kv", "quantize_main_kv"):
    quantize = getattr(reference, name)
    setattr(reference, name, lambda x, quantize=quantize: decode_v4(encode_v4(quantize(x))))
bench = Bench(pages=4)
bench.backend.ops = bench.pool._ops = TritonOps("flashmla", "packed records")
bench.backend.indexer = CudaIndexer(bench.plan)
request, other = Request.draw(8, seed=1, slot=3), Request.draw(6, seed=2, slot=1)
bench.forward([(request, 5), (other, 3)])
bench.backend.device_type = "cuda"  # decode as on a GPU
bench.forward([(other, 1), (request, 1)], "DECODE")
assert bench.backend.forward_metadata.groups is None
for one in (request, other):
    for layer_id, out in expected(bench, one, score_dtype=torch.float32).outputs.items():
        error = relative_error(bench.output(one, layer_id), out)
        assert error < 5e-3, (layer_id, error)
# Three kinds of layers (window, ratio 2, ratio 1) in two forwards: one schedule each, none used again.
assert len(schedules) == 6, len(schedules)
print("ROUTE HELD")
"""


def test_the_gpu_routes_interpreted():
    command = [sys.executable, "-c", RUN, str(TESTS)]
    variables = {"TRITON_INTERPRET": "1", envs.KV_LAYOUT: "v4"}
    run = subprocess.run(command, env=environment(**variables), capture_output=True, text=True, timeout=900)
    assert run.returncode == 0 and "ROUTE HELD" in run.stdout, run.stderr[-3000:]
