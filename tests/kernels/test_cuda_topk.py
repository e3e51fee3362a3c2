"""What the CUDA C++ selection does beyond the tests it shares with Triton's (`test_topk.py`)."""

import kernel_cases as cases
import pytest
import torch

from sglang_csa2.kernels import triton_topk


@pytest.fixture
def kernels():
    return cases.module_of("cuda_topk")


def _maxima(rows, entries, device):
    blocks = (torch.randn(rows, entries // 8, device=device) * 64).round() / 64
    return blocks, blocks.view(rows, -1, 8).amax(-1)


@pytest.mark.parametrize("direct", [128, 8192, 16384])
@pytest.mark.parametrize(("entries", "k"), [(1 << 15, 512), (1 << 17, 2048), (1 << 20, 512), (1 << 20, 2048)])
def test_the_blocks_that_triton_chooses(entries, k, direct, kernels, device, monkeypatch):
    monkeypatch.setattr(kernels, "DIRECT", direct)
    maxima = _maxima(5, entries, device)
    visible = torch.tensor([entries, entries - 1, entries // 2 + 3, 8 * k + 1, 0], device=device)
    for newest in (True, False):
        have = kernels.best_blocks(*maxima, visible, k, keep_newest=newest)
        assert torch.equal(have, triton_topk.best_blocks(*maxima, visible, k, keep_newest=newest))


@pytest.mark.parametrize("direct", [128, 8192, 16384])
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("num_blocks", [65, 512, 2048])
def test_the_positions_and_slots_that_triton_chooses(num_blocks, ratio, direct, kernels, device, monkeypatch):
    monkeypatch.setattr(kernels, "DIRECT", direct)
    rows, entries = 40, 1 << 15
    req_to_token, _ = cases.paged_context(4, entries * ratio, device)
    requests = torch.randint(0, 4, (rows,), device=device)
    visible = torch.randint(0, entries, (rows,), device=device)
    chosen = [torch.randperm(entries // 8, device=device)[:num_blocks].sort().values for _ in range(rows)]
    blocks = torch.stack(chosen).int()
    blocks = blocks.masked_fill(blocks * 8 >= visible[:, None], -1)
    scores = (torch.randn(rows, num_blocks * 8, device=device) * 64).round() / 64
    position = blocks.repeat_interleave(8, 1) * 8 + torch.arange(num_blocks * 8, device=device) % 8
    scores = scores.masked_fill((position < 0) | (position >= visible[:, None]), -torch.inf)
    # All that a row sees must be listed where it is few.
    visible = torch.where(visible <= min(512, num_blocks * 8), 0, visible)
    arguments = (scores, scores.view(rows, -1, 8).amax(-1), blocks, visible, 512, req_to_token, requests, ratio)
    for have, want in zip(kernels.select_slots(*arguments), triton_topk.select_slots(*arguments), strict=True):
        assert torch.equal(have, want)


def test_graph_replays_follow_the_device(kernels, device):
    block_max, tile_max = _maxima(3, 1 << 17, device)
    visible = torch.ones(3, dtype=torch.int64, device=device)
    kernels.best_blocks(block_max, tile_max, visible, 512, keep_newest=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chosen = kernels.best_blocks(block_max, tile_max, visible, 512, keep_newest=True)
    for lengths in ([1 << 17, 5000, 65537], [8, 100_000, 4097]):
        visible.copy_(torch.tensor(lengths))
        block_max.copy_(torch.randn_like(block_max))
        tile_max.copy_(block_max.view(3, -1, 8).amax(-1))
        graph.replay()
        assert torch.equal(chosen, triton_topk.best_blocks(block_max, tile_max, visible, 512, keep_newest=True))


def test_refusals(kernels, device):
    block_max, tile_max = _maxima(1, 1 << 15, device)
    visible = torch.ones(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="one CUDA device"):
        kernels.best_blocks(block_max, tile_max, visible.cpu(), 512, keep_newest=True)
    blocks = torch.zeros(1, 8, dtype=torch.int32, device=device)
    scores = torch.zeros(1, 64, device=device)
    with pytest.raises(ValueError, match="ratio is 3"):
        kernels.select_slots(scores, scores[:, :8].contiguous(), blocks, visible, 8, blocks, visible, 3)
