"""Index scores against the reference in float64, with NaN scales in every page and slot that must not be read."""

import index_cases
import kernel_cases as cases
import pytest
import torch

from sglang_csa2.kernels import triton_index_scores
from sglang_csa2.kernels.index_scores import gather_index_k
from sglang_csa2.layout import INDEX_PAGE_SLOTS
from sglang_csa2.reference import index_scores as reference_scores

LENGTHS = cases.pick(
    [0, 1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 513, 16383, 16385], [0, 1, 9, 129]
)


@pytest.fixture(params=["triton_index_scores", "cuda_index_decode"])
def kernels(request):
    return cases.module_of(request.param)


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("heads", cases.pick([4, 32], [4]))
def test_decode(ratio, heads, kernels, device, monkeypatch):
    check_decode(kernels, index_cases.Case(LENGTHS, ratio, heads, device), monkeypatch)


def check_decode(kernels, case, monkeypatch):
    ratio = case.ratio
    cases.poison_outputs(monkeypatch)
    maxima = kernels.block_maxima(*case.arguments(), case.requests, case.visible, ratio, case.width)
    skipping = kernels.block_maxima(*case.arguments(), case.requests, case.visible, ratio, case.width, skip=128)
    for row, length in enumerate(case.visible.tolist()):
        index_cases.check(case, row, maxima)
        for have, want in zip(skipping, maxima, strict=True):
            if length <= 128:
                assert have[row].isnan().all()
            else:
                assert torch.equal(have[row].nan_to_num(), want[row].nan_to_num())


@pytest.mark.skipif(cases.INTERPRETED, reason="long")
@pytest.mark.parametrize(("length", "ratio"), [(131073, 1), (131073, 2), (524288, 1)])
def test_decode_long(length, ratio, kernels, device):
    case = index_cases.Case([length, 3], ratio, 32, device)
    maxima = kernels.block_maxima(*case.arguments(), case.requests.int(), case.visible.int(), ratio, case.width)
    for row, visible in enumerate(case.visible.tolist()):
        index_cases.check(case, row, [m[:, : -(-visible // size)] for m, size in zip(maxima, (8, 64), strict=True)])


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("length", cases.pick([1, 7, 128, 129, 513, 16385], [7, 129]))
def test_prefill(ratio, length, device, monkeypatch):
    rows = cases.pick([70], [3])[0]
    case = index_cases.Case([length], ratio, 32, device, rows_per_request=rows)
    case.visible = torch.arange(length - rows + 1, length + 1, device=device).clamp(min=0)
    case.requests = torch.zeros_like(case.visible)
    cases.poison_outputs(monkeypatch)
    arguments = (*case.arguments(), case.requests[:1], case.visible, ratio, case.width)
    maxima = triton_index_scores.block_maxima_prefill(*arguments)
    skipping = triton_index_scores.block_maxima_prefill(*arguments, skip=128)
    for row, visible in enumerate(case.visible.tolist()):
        index_cases.check(case, row, maxima)
        if visible > 128:
            index_cases.check(case, row, skipping)
    if length <= 128:
        assert skipping.blocks.isnan().all()


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("num_blocks", cases.pick([1, 15, 16, 17, 2048], [1, 17]))
def test_candidates(ratio, num_blocks, kernels, device, monkeypatch):
    check_candidates(kernels, index_cases.Case(LENGTHS, ratio, 32, device), num_blocks, monkeypatch)


def check_candidates(kernels, case, num_blocks, monkeypatch):
    ratio, rows, device = case.ratio, len(case.visible), case.q.device
    blocks = torch.full((rows, num_blocks), -1, dtype=torch.int32, device=device)
    for row, length in enumerate(case.visible.tolist()):
        some = torch.randperm(-(-length // 8), device=device)[: num_blocks - row % 2].sort().values
        blocks[row, : len(some)] = some.int()
    cases.poison_outputs(monkeypatch)
    have, block_max = kernels.index_scores_candidates(*case.arguments(), case.requests, case.visible, ratio, blocks)
    for row in range(rows):
        entries = (blocks[row, :, None] * 8 + torch.arange(8, device=device)).flatten()
        there = (blocks[row].repeat_interleave(8) >= 0) & (entries < case.visible[row])
        assert (have[row, ~there] == -torch.inf).all()
        exact, eager = case.expected(row)
        assert torch.equal(block_max[row], have[row].view(-1, 8).amax(-1))
        if there.any():
            want, rough = exact[entries[there].long()], eager[entries[there].long()]
            error = cases.relative_error(have[row, there], want)
            assert error < 1e-5
            assert error <= max(cases.SLACK * cases.relative_error(rough, want), 1e-6)
    arguments = (*case.arguments(), case.requests, case.visible, ratio, blocks)
    for skipping, all_of in zip(kernels.index_scores_candidates(*arguments, skip=128), (have, block_max), strict=True):
        short = case.visible <= 128
        assert skipping[short].isnan().all()
        assert torch.equal(skipping[~short], all_of[~short])


@pytest.mark.skipif(cases.INTERPRETED, reason="allocates 2 GiB")
def test_slots_past_two_gib(kernels, device):
    case = index_cases.Case([200], 1, 32, device)
    pages = 2**31 // case.cache.shape[1] + 8
    pages += -pages % 4
    cache = torch.empty(pages, case.cache.shape[1], dtype=torch.uint8, device=device)
    cache[-4:] = case.cache[:4]
    case.cache = cache
    case.req_to_token = torch.arange(256, device=device).view(1, -1).int() + (pages - 4) * INDEX_PAGE_SLOTS
    case.requests.zero_()
    keys = gather_index_k(cache, case.req_to_token[0, :200].long())
    exact = reference_scores(case.q, keys, case.weights, dtype=torch.float64)[0]
    maxima = kernels.block_maxima(*case.arguments(), case.requests, case.visible, 1, case.width)
    assert cases.relative_error(maxima.blocks[0, :25], index_cases.maxima_of(exact, 8)) < 1e-5
    blocks = torch.arange(25, device=device, dtype=torch.int32).view(1, -1)
    scores, _ = kernels.index_scores_candidates(*case.arguments(), case.requests, case.visible, 1, blocks)
    assert cases.relative_error(scores[0], exact) < 1e-5


def test_refusals(kernels, device):
    case = index_cases.Case([5], 1, 4, device)
    with pytest.raises(ValueError, match="multiple of 64"):
        kernels.block_maxima(*case.arguments(), case.requests, case.visible, 1, 100)
    with pytest.raises(ValueError, match="ratio is 3"):
        kernels.block_maxima(*case.arguments(), case.requests, case.visible, 3, 64)
