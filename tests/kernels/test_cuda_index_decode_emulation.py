"""The CUDA C++ index scores of decode rows on the CPU, emulated (`cuda_emulation.h`): the GPU tests at small sizes."""

from types import SimpleNamespace

import cuda_emulation
import index_cases
import kernel_cases as cases
import pytest
import torch
from test_cuda_index_decode import check_groups
from test_index_scores import check_candidates, check_decode

from sglang_csa2.kernels import cuda_index_decode as kernels
from sglang_csa2.kernels.triton_index_scores import BLOCK_ENTRIES, room_for_maxima

pytestmark = cuda_emulation.needs_compiler

_LAUNCH = """
template <bool LISTED, int GROUP>
cudaError_t launch(const Params& params, int blocks, bool, cudaStream_t) {
  static_assert(sizeof(Shared<GROUP>) <= emulation::kSharedBytes);
  return emulation::launch([=] { index_scores_kernel<LISTED, GROUP>(params); }, blocks, kThreads<GROUP>);
}

"""


@pytest.fixture(scope="module", params=[(), ("-DCSA2_EVERY_LANE_ARRIVES",)], ids=["served", "every lane arrives"])
def library(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("emulation")
    return cuda_emulation.build(kernels.SOURCE, _LAUNCH, kernels.FUNCTIONS, folder, request.param)


def _emulated(library, grid):
    """The kernels' module on the CPU, with launches of `grid` blocks."""

    def block_maxima(*tensors, skip=0, group=1):
        *tensors, ratio, width = tensors
        maxima = room_for_maxima(len(tensors[0]), width, tensors[0].device)
        status = kernels.call_block_maxima(library, tensors, ratio, width, skip, group, maxima, grid, 0)
        cuda_emulation.check(status)
        return maxima

    def index_scores_candidates(*tensors, skip=-1):
        *tensors, ratio, blocks = tensors
        logits = torch.empty(len(blocks), blocks.shape[1] * BLOCK_ENTRIES, dtype=torch.float32, device=blocks.device)
        best = torch.empty(*blocks.shape, dtype=torch.float32, device=blocks.device)
        status = kernels.call_candidates(library, tensors, ratio, blocks, skip, logits, best, grid, 0)
        cuda_emulation.check(status)
        return logits, best

    return SimpleNamespace(block_maxima=block_maxima, index_scores_candidates=index_scores_candidates)


DEVICE = torch.device("cpu")
SHORT = [0, 1, 7, 8, 9, 63, 64, 65, 129]


@pytest.mark.parametrize(("ratio", "heads", "grid", "seed"), [(1, 32, 1, 1), (2, 4, 2, 2), (1, 13, 5, 3)])
def test_decode(library, ratio, heads, grid, seed, monkeypatch):
    monkeypatch.setenv("EMULATION_SEED", str(seed))
    check_decode(_emulated(library, grid), index_cases.Case(SHORT, ratio, heads, DEVICE), monkeypatch)


def test_decode_of_many_tiles(library, monkeypatch):
    # A warp goes around its ring several times, looks more tiles up, and passes from row to row, some of them empty.
    lengths = [*[0] * 40, 3000, 0, 0, 1, 22000, *[0] * 33, 5, 700]
    case = index_cases.Case(lengths, 1, 32, DEVICE)
    cases.poison_outputs(monkeypatch)
    arguments = (*case.arguments(), case.requests.int(), case.visible.int(), 1, case.width)
    maxima = _emulated(library, 1).block_maxima(*arguments)
    for row in range(len(lengths)):
        index_cases.check(case, row, maxima)


@pytest.mark.parametrize(("ratio", "num_blocks", "grid", "seed"), [(1, 1, 1, 1), (2, 17, 1, 2), (1, 70, 2, 3)])
def test_candidates(library, ratio, num_blocks, grid, seed, monkeypatch):
    monkeypatch.setenv("EMULATION_SEED", str(seed))
    case = index_cases.Case([*SHORT, 1025], ratio, 32, DEVICE)
    check_candidates(_emulated(library, grid), case, num_blocks, monkeypatch)


def test_absent_blocks_among_others(library):
    case = index_cases.Case([1000], 1, 32, DEVICE)
    blocks = torch.tensor([[-1, 3, -1, 124, 7, *[-1] * 20, 125, 0]], dtype=torch.int32)
    arguments = (*case.arguments(), case.requests, case.visible, 1)
    emulated = _emulated(library, 1)
    scores, best = emulated.index_scores_candidates(*arguments, blocks)
    assert torch.equal(best == -torch.inf, (blocks < 0) | (blocks * 8 >= 1000))
    # A list and a scan give the same bits.
    maxima = emulated.block_maxima(*arguments, case.width)
    there = best > -torch.inf
    assert torch.equal(best[there], maxima.blocks[0, blocks[there].long()])
    assert torch.equal(scores.view(1, -1, 8).amax(-1), best)


@pytest.mark.parametrize(("group", "grid", "seed"), [(1, 1, 1), (2, 1, 2), (6, 2, 3)])
def test_groups(library, group, grid, seed, monkeypatch):
    monkeypatch.setenv("EMULATION_SEED", str(seed))
    check_groups(_emulated(library, grid), [0, 130, 5, 1000, 64], group, DEVICE, monkeypatch)


def test_nothing_to_do(library):
    case = index_cases.Case([0, 0, 0], 1, 32, DEVICE)
    arguments = (*case.arguments(), case.requests, case.visible, 1)
    _emulated(library, 2).block_maxima(*arguments, 128)
