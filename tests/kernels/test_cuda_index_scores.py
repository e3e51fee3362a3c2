"""The CUDA C++ prefill scan against the reference in float64, with NaN scales in every slot that must not be read."""

import index_cases
import kernel_cases as cases
import pytest
import torch

from sglang_csa2.kernels import cuda_build
from sglang_csa2.kernels import cuda_index_scores as kernels
from sglang_csa2.kernels import triton_index_scores as triton_kernels
from sglang_csa2.kernels.cuda_index_scores import Tile
from sglang_csa2.kernels.triton_records import compute_capability
from sglang_csa2.layout import INDEX_PAGE_SLOTS


def _missing():
    if cases.INTERPRETED or not torch.cuda.is_available():
        return "needs a CUDA device"
    return cuda_build.missing(compute_capability(torch.device("cuda")))


pytestmark = pytest.mark.skipif(_missing() is not None, reason=str(_missing()))


def _scan(case, skip=0, tile=None, **changes):
    named = {"request": case.requests[:1], "visible": case.visible, "ratio": case.ratio, "width": case.width}
    return kernels.block_maxima_prefill(*case.arguments(), **{**named, **changes}, skip=skip, tile=tile)


def _check(case, monkeypatch, skip=0, **changes):
    cases.poison_outputs(monkeypatch)
    index_cases.check_prefill(case, _scan(case, skip, **changes), skip)


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("length", [1, 7, 8, 64, 127, 128, 129, 255, 256, 257, 513, 16385])
def test_causal(ratio, length, device, monkeypatch):
    case = index_cases.prefill_case([max(length - 70 + i, 0) for i in range(1, 71)], ratio, 32, device)
    _check(case, monkeypatch)
    _check(case, monkeypatch, skip=128)


@pytest.mark.parametrize("heads", [1, 4, 13, 16, 20, 32, 33, 48, 64])
@pytest.mark.parametrize("rows", [1, 3, 4, 33, 150])
def test_heads(heads, rows, device, monkeypatch):
    case = index_cases.prefill_case([*torch.randint(0, 900, (rows - 1,)).tolist(), 900], 1, heads, device)
    _check(case, monkeypatch)


@pytest.mark.parametrize("groups", [1, 3, 5, 64, 128])
@pytest.mark.parametrize("heads", [16, 32, 64])
def test_groups_of_a_block(heads, groups, device, monkeypatch):
    # Fewer and more groups than stages, blocks that end within a group's rows.
    case = index_cases.prefill_case([1000 + i for i in range(201)], 2, heads, device)
    _check(case, monkeypatch, tile=Tile(heads, groups))


@pytest.mark.parametrize("ratio", [1, 2])
def test_lengths_in_any_order(ratio, device, monkeypatch):
    lengths = [300, 3, 0, 20] + [5] * 4 + [0] * 8 + [10, 2000, 260, 0] + [256] * 3 + torch.randperm(1500)[:250].tolist()
    case = index_cases.prefill_case(lengths, ratio, 32, device)
    _check(case, monkeypatch)
    _check(case, monkeypatch, skip=700)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integer_types(dtype, device, monkeypatch):
    case = index_cases.prefill_case([500, 100, 777], 1, 32, device)
    case.req_to_token = case.req_to_token.to(dtype)
    _check(case, monkeypatch, visible=case.visible.to(dtype), request=case.requests[:1].to(dtype))


def test_another_request(device, monkeypatch):
    case = index_cases.prefill_case([500, 100, 777], 2, 32, device)
    case.req_to_token = case.req_to_token.flip(0).contiguous()
    case.requests += len(case.req_to_token) - 1
    _check(case, monkeypatch)


@pytest.mark.parametrize("width", [64, 128, 192, 320])
def test_visible_past_the_width(width, device, monkeypatch):
    # What a row wrote past the width would lie in the next row, which sees nothing.
    case = index_cases.prefill_case([width, width - 1, width, 0], 1, 32, device)
    seen = case.visible + torch.tensor([1000, 0, 1, 0], device=device)
    case.width = width
    _check(case, monkeypatch, visible=seen)


@pytest.mark.parametrize("seen", [0, 100])
def test_nothing_to_do(seen, device, monkeypatch):
    case = index_cases.prefill_case([seen] * 9, 1, 32, device)
    cases.poison_outputs(monkeypatch)
    assert all(part.isnan().all() for part in _scan(case, skip=100))
    assert _scan(case, width=0).blocks.shape == (9, 0)


@pytest.mark.parametrize("factor", [2.0**-6, 2.0**20])
def test_large_and_small_scores(factor, device, monkeypatch):
    case = index_cases.prefill_case([333, 400, 1], 1, 32, device)
    case.q, case.weights = case.q * factor, case.weights * 8
    _check(case, monkeypatch)


@pytest.mark.parametrize("heads", [16, 32, 64])
def test_as_triton(heads, device):
    case = index_cases.prefill_case([20_000 + 3 * i for i in range(1500)], 1, heads, device)
    arguments = (*case.arguments(), case.requests[:1], case.visible, 1, case.width)
    have, want = kernels.block_maxima_prefill(*arguments), triton_kernels.block_maxima_prefill(*arguments)
    for mine, other, size in zip(have, want, (8, 64), strict=True):
        seen = torch.arange(mine.shape[1], device=device) * size < case.visible[:, None]
        torch.testing.assert_close(mine[seen], other[seen], rtol=1e-4, atol=1e-5)


def test_same_input_same_bits(device):
    case = index_cases.prefill_case([9000 + i for i in range(700)], 1, 32, device)
    first = _scan(case)
    for _ in range(5):
        for mine, other, size in zip(_scan(case), first, (8, 64), strict=True):
            seen = torch.arange(mine.shape[1], device=device) * size < case.visible[:, None]
            assert torch.equal(mine[seen], other[seen])


def test_slots_past_two_gib(device, monkeypatch):
    case = index_cases.prefill_case([200, 190, 256], 1, 32, device)
    pages = 2**31 // case.cache.shape[1] + 8
    pages += -pages % 4
    cache = torch.empty(pages, case.cache.shape[1], dtype=torch.uint8, device=device)
    cache[-len(case.cache) :] = case.cache
    case.req_to_token += (pages - len(case.cache)) * INDEX_PAGE_SLOTS
    case.cache = cache
    _check(case, monkeypatch)


def test_graph_replays_follow_the_device(device, monkeypatch):
    case = index_cases.prefill_case([600 + i for i in range(50)], 1, 32, device)
    _scan(case)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        maxima = _scan(case)
    case.q.copy_(case.q.flip(0))
    case.visible.copy_(case.visible.flip(0) - 100)
    for part in maxima:
        part.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    index_cases.check_prefill(case, maxima)


def test_refusals(device):
    case = index_cases.prefill_case([5, 6], 1, 4, device)
    with pytest.raises(ValueError, match="multiple of 64"):
        _scan(case, width=100)
    with pytest.raises(ValueError, match="one CUDA device"):
        _scan(case, visible=case.visible.cpu())
    with pytest.raises(RuntimeError, match="did not launch"):
        _scan(case, tile=Tile(32, 129))
    case.q, case.weights = case.q.repeat(1, 20, 1), case.weights.repeat(1, 20)
    with pytest.raises(ValueError, match="80 heads"):
        _scan(case)
    odd = torch.empty(2 * 4 * 128 + 1, dtype=torch.bfloat16, device=device)[1:].view(2, 4, 128)
    case.q, case.weights = odd, case.weights[:, :4].contiguous()
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        _scan(case)
