"""What the CUDA C++ index scores do beyond the tests they share with Triton's (`test_index_scores.py`)."""

import index_cases
import kernel_cases as cases
import pytest
import torch

from sglang_csa2.kernels import triton_index_scores


@pytest.fixture
def kernels():
    return cases.module_of("cuda_index_decode")


@pytest.mark.parametrize("rows", [1, 31, 33, 200])
def test_many_rows_some_empty(rows, kernels, device, monkeypatch):
    # Warps start and end within rows, and pass over rows that need nothing.
    lengths = [0 if row % 3 == 1 else (row * 7919) % 9000 for row in range(rows)]
    case = index_cases.Case([*lengths, 70000], 1, 32, device)
    cases.poison_outputs(monkeypatch)
    maxima = kernels.block_maxima(*case.arguments(), case.requests, case.visible, 1, case.width)
    for row in range(0, rows + 1, 7):
        index_cases.check(case, row, maxima)


@pytest.mark.parametrize("group", [1, 2, 6])
def test_groups(group, kernels, device, monkeypatch):
    check_groups(kernels, [0, 130, 5, 20000, 64, *[300] * 40], group, device, monkeypatch)


def check_groups(kernels, lengths, group, device, monkeypatch):
    """Rows of one request that see more and more of it, some of them too little to be scored, against single rows."""
    case = index_cases.Case(lengths, 1, 32, device, rows_per_request=group)
    case.visible = (case.visible - torch.arange(group, device=device).flip(0).repeat(len(lengths))).clamp(min=0)
    cases.poison_outputs(monkeypatch)
    arguments = (*case.arguments(), case.requests, case.visible, 1, case.width)
    for skip in (0, 62, 128):
        together = kernels.block_maxima(*arguments, skip=skip, group=group)
        alone = kernels.block_maxima(*arguments, skip=skip)
        for have, want in zip(together, alone, strict=True):
            assert torch.equal(have.view(torch.int32), want.view(torch.int32))
    for row in range(0, len(case.visible), max(1, len(case.visible) // 40)):
        index_cases.check(case, row, kernels.block_maxima(*arguments, group=group))


def test_a_list_and_a_scan_give_the_same_bits(kernels, device):
    case = index_cases.Case([40001, 513], 2, 32, device)
    maxima = kernels.block_maxima(*case.arguments(), case.requests, case.visible, 2, case.width)
    blocks = torch.stack([torch.arange(65, device=device), torch.arange(65, device=device) * 77]).int()
    _, best = kernels.index_scores_candidates(*case.arguments(), case.requests, case.visible, 2, blocks)
    for row, length in enumerate(case.visible.tolist()):
        there = blocks[row] * 8 < length
        assert torch.equal(best[row, there], maxima.blocks[row, blocks[row, there].long()])


def test_scores_agree_with_triton(kernels, device):
    case = index_cases.Case([131073, 9999, 64], 1, 32, device)
    arguments = (*case.arguments(), case.requests, case.visible, 1, case.width)
    for have, want in zip(kernels.block_maxima(*arguments), triton_index_scores.block_maxima(*arguments), strict=True):
        for row, length in enumerate(case.visible.tolist()):
            seen = -(-length * have.shape[1] // case.width)
            assert cases.relative_error(have[row, :seen], want[row, :seen]) < 1e-6


def test_graph_replays_follow_the_device(kernels, device):
    case = index_cases.Case([5000, 20000, 64], 1, 32, device)
    case.visible = case.visible.clone()
    live, case.visible[:] = case.visible.clone(), 1
    arguments = (*case.arguments(), case.requests, case.visible, 1, case.width)
    kernels.block_maxima(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        maxima = kernels.block_maxima(*arguments)
    case.visible.copy_(live)
    for part in maxima:
        part.fill_(torch.nan)
    graph.replay()
    for row in range(3):
        index_cases.check(case, row, maxima)


def test_refusals(kernels, device):
    case = index_cases.Case([5], 1, 64, device)
    with pytest.raises(ValueError, match="64 index heads"):
        kernels.block_maxima(*case.arguments(), case.requests, case.visible, 1, 64)
    case = index_cases.Case([5], 1, 32, device)
    with pytest.raises(ValueError, match="one CUDA device"):
        kernels.block_maxima(*case.arguments(), case.requests, case.visible.cpu(), 1, 64)
    with pytest.raises(ValueError, match="group is 2 for 1 rows"):
        kernels.block_maxima(*case.arguments(), case.requests, case.visible, 1, 64, group=2)
    case.cache = torch.zeros(5, 4360, dtype=torch.uint8, device=device)[:, :4352]
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        kernels.block_maxima(*case.arguments(), case.requests, case.visible, 1, 64)
