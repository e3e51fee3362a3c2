"""The backend on a GPU over the host's real pool, against the plain reference; needs the host stack and a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="the host stack is not installed: only the kernel tests run here")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from harness import Bench, Request, expected, relative_error

NOISE = 8e-3  # bf16 storage of q, keys, attention weights and outputs
WHOLE = [(300, "EXTEND")]
CHUNKS = [(count, "EXTEND") for count in (7, 1, 1, 255, 36)]
DECODED = [(250, "EXTEND")] + [(1, "DECODE")] * 12


def assert_expected(bench, request):
    wanted = expected(bench, request, score_dtype=torch.float32)
    for layer_id, out in wanted.outputs.items():
        error = relative_error(bench.output(request, layer_id), out)
        assert error < NOISE, f"layer {layer_id}: {error}"


def assert_thresholds(bench, request, rows):
    """The last forward's choices are the reference's, but for scores that fp32 sums in another order tie."""
    wanted = expected(bench, request, score_dtype=torch.float32)
    selection = bench.backend.forward_metadata.selection
    for layer_id, reference_choice in wanted.chosen.items():
        chosen = selection.topk[layer_id].positions[-rows:].long().cpu()
        assert torch.equal((chosen >= 0).sum(1), (reference_choice[-rows:] >= 0).sum(1))
        wanted_number = int((reference_choice[-rows:] >= 0).sum())
        shared = sum(
            len(set(a[a >= 0].tolist()) & set(b[b >= 0].tolist()))
            for a, b in zip(chosen, reference_choice[-rows:], strict=True)
        )
        assert shared >= 0.999 * wanted_number, f"layer {layer_id}: {shared} of {wanted_number}"


@pytest.mark.parametrize("schedule", [WHOLE, CHUNKS, DECODED], ids=["whole", "chunks", "decoded"])
def test_schedules(schedule):
    bench = Bench(device="cuda")
    request = Request.draw(sum(count for count, _ in schedule), seed=1, slot=3)
    for count, mode in schedule:
        bench.forward([(request, count)], mode)
    assert_thresholds(bench, request, schedule[-1][0])
    assert_expected(bench, request)


def test_mixed_batches_and_orders():
    bench = Bench(device="cuda", pages=40)
    requests = [Request.draw(400, seed=i, slot=i) for i in range(1, 6)]
    bench.forward([(requests[0], 201), (requests[1], 130)])
    bench.forward([(requests[0], 1), (requests[1], 1), (requests[2], 77), (requests[3], 77), (requests[4], 0)], "MIXED")
    bench.forward([(requests[0], 1), (requests[2], 33), (requests[3], 1), (requests[4], 9)], "MIXED")
    bench.forward([(requests[i], 1) for i in (3, 0, 4)], "DECODE")
    for request in requests:
        assert_expected(bench, request)


def test_late_layers_run_on_the_tail():
    bench = Bench(device="cuda", replays_tail=True)
    request = Request.draw(400, seed=1, slot=3)
    bench.forward([(request, 301)])
    replayed = expected(bench, request, replayed_from=301 - 128, score_dtype=torch.float32)
    for layer_id in range(5, 10):
        assert relative_error(bench.output(request, layer_id), replayed.outputs[layer_id][-128:]) < NOISE
    bench.forward([(request, 1)], "DECODE")
    exact = expected(bench, request, score_dtype=torch.float32)
    for layer_id in range(10):
        assert relative_error(bench.output(request, layer_id)[-1:], exact.outputs[layer_id][-1:]) < NOISE


def test_a_captured_decode_follows_the_live_lengths():
    """One graph of four rows, replayed with other requests and lengths, two rows of it padding."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    bench = Bench(device="cuda", pages=40)
    requests = [Request.draw(400, seed=i, slot=i) for i in range(1, 4)]
    for request, n in zip(requests, (130, 300, 5), strict=True):
        bench.forward([(request, n)])

    static = SimpleNamespace(
        forward_mode=ForwardMode.DECODE, batch_size=4,
        out_cache_loc=torch.zeros(4, dtype=torch.int64, device="cuda"),
        seq_lens=torch.zeros(4, dtype=torch.int64, device="cuda"), seq_lens_cpu=torch.zeros(4, dtype=torch.int64),
        req_pool_indices=torch.zeros(4, dtype=torch.int64, device="cuda"),
    )  # fmt: skip
    inputs = [request_inputs.rows(slice(0, 4)).to("cuda") for request_inputs in requests[0].inputs]

    def forward():
        bench.backend.init_forward_metadata_in_graph(static)
        return [
            bench.run_layer(layer, data, static, check=False) for layer, data in zip(bench.layers, inputs, strict=True)
        ]

    bench.backend.init_forward_metadata_out_graph(static, in_capture=True)
    before = [bench.pool.main_cache(source).clone() for source in (2, 5)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = forward()
    for source, cache in zip((2, 5), before, strict=True):
        assert torch.equal(bench.pool.main_cache(source), cache), "capture with padding rows wrote a cache"

    for batch in ([requests[0], requests[1]], [requests[2], requests[0], requests[1]], [requests[1]]) * 3:
        slots = torch.cat([bench._grow(request, request.length + 1) for request in batch])
        for buffer in (static.out_cache_loc, static.req_pool_indices):
            buffer.zero_()
        static.seq_lens.fill_(1)
        static.out_cache_loc[: len(batch)] = slots
        static.req_pool_indices[: len(batch)] = torch.tensor([r.slot for r in batch], device="cuda")
        static.seq_lens[: len(batch)] = torch.tensor([r.length + 1 for r in batch], device="cuda")
        for layer_id, data in enumerate(inputs):
            for name in ("q", "kv", "x", "q_lora"):
                rows = [getattr(r.inputs[layer_id], name)[r.length] for r in batch]
                getattr(data, name)[: len(batch)] = torch.stack(rows).to("cuda")
        graph.replay()
        for row, request in enumerate(batch):
            request.length += 1
            request.outputs.append({i: out[row : row + 1].cpu() for i, out in enumerate(outputs)})
    for request in requests:
        assert_expected(bench, request)
