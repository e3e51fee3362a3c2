"""What the CUDA C++ selection does beyond the tests it shares with Triton's (`test_topk.py`)."""

import kernel_cases as cases
import pytest
import torch

from sglang_csa2.kernels import triton_topk

# What a row of one block narrows by levels from on, and the blocks of a row's cluster.
FORMS = [(128, 0), (8192, 0), (16384, 0), (0, 1), (0, 2), (0, 4), (0, 8), (0, 16)]


@pytest.fixture
def kernels():
    return cases.module_of("cuda_topk")


def _in_form(kernels, form, width, monkeypatch):
    direct, split = form
    if split and width > min(split * kernels.MAX_SHARE, kernels.MAX_WIDTH):
        pytest.skip("more than the cluster holds")
    monkeypatch.setattr(kernels, "DIRECT", direct)
    monkeypatch.setattr(kernels, "choose_split", lambda *sizes: split)


def _maxima(rows, entries, device):
    blocks = (torch.randn(rows, entries // 8, device=device) * 64).round() / 64
    return blocks, blocks.view(rows, -1, 8).amax(-1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 8, 33, 200])
@pytest.mark.parametrize(
    ("entries", "k"), [(1 << 14, 512), (1 << 15, 512), (1 << 17, 2048), (1 << 20, 512), (1 << 20, 2048)]
)
def test_the_blocks_that_triton_chooses(entries, k, rows, form, kernels, device, monkeypatch):
    _in_form(kernels, form, entries // 8, monkeypatch)
    maxima = _maxima(rows, entries, device)
    visible = torch.tensor([entries, entries - 1, entries // 2 + 3, 8 * k + 1, 0], device=device).repeat(40)[:rows]
    for newest in (True, False):
        have = kernels.best_blocks(*maxima, visible, k, keep_newest=newest)
        assert torch.equal(have, triton_topk.best_blocks(*maxima, visible, k, keep_newest=newest))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "ratio"), [(1, 1), (3, 2), (8, 2), (33, 1), (200, 2)])
@pytest.mark.parametrize("num_blocks", [65, 512, 2048])
def test_the_positions_and_slots_that_triton_chooses(num_blocks, rows, ratio, form, kernels, device, monkeypatch):
    _in_form(kernels, form, num_blocks * 8, monkeypatch)
    entries = 1 << 15
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


@pytest.mark.parametrize("rows", [1, 3, 8, 33, 200, 1000])
def test_the_form_that_is_served(rows, kernels, device):
    maxima = _maxima(rows, 1 << 17, device)
    visible = torch.randint(0, 1 << 17, (rows,), device=device)
    have = kernels.best_blocks(*maxima, visible, 512, keep_newest=True)
    assert torch.equal(have, triton_topk.best_blocks(*maxima, visible, 512, keep_newest=True))


def test_scores_that_are_not_aligned(kernels, device):
    block_max, tile_max = _maxima(1, 1 << 15, device)
    moved = torch.cat([block_max.new_zeros(1), block_max.flatten()])[1:].view(1, -1)
    visible = torch.tensor([30_000], device=device)
    have = kernels.best_blocks(moved, tile_max, visible, 512, keep_newest=True)
    assert torch.equal(have, triton_topk.best_blocks(block_max, tile_max, visible, 512, keep_newest=True))


@pytest.mark.parametrize("split", [0, 1, 8])
def test_graph_replays_follow_the_device(split, kernels, device, monkeypatch):
    _in_form(kernels, (8192, split), 1 << 14, monkeypatch)
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
