"""The CUDA C++ prefill scan on the CPU: its source, with threads as fibers and PTX emulated (`cuda_emulation.h`)."""

import cuda_emulation
import index_cases
import pytest
import torch

from sglang_csa2.kernels import cuda_index_scores as kernels
from sglang_csa2.kernels.triton_index_scores import room_for_maxima

pytestmark = cuda_emulation.needs_compiler

_LAUNCH = """
inline bool run_all(int x, int y, int threads) {
  const char* seed = getenv("EMULATION_SEED");
  emulation::grid_x = x, emulation::threads = threads;
  for (int j = 0; j < y; ++j) {
    for (int i = 0; i < x; ++i) {
      if (!emulation::run(i, j, 1, seed ? atoi(seed) : 1)) return false;
    }
  }
  return true;
}

template <int HEADS>
cudaError_t launch(const Params& params, int groups, cudaStream_t) {
  static_assert(sizeof(Shared<HEADS>) <= emulation::kSharedBytes);
  emulation::kernel = [=] { arrange_queries_kernel<HEADS>(params); };
  if (!run_all(groups, 1, kArrangeThreads)) return kDeadlock;
  emulation::kernel = [=] { block_maxima_prefill_kernel<HEADS>(params); };
  const int tiles = (params.width + kTileKeys - 1) / kTileKeys;
  const int blocks = (groups + params.block_groups - 1) / params.block_groups;
  return run_all(tiles, blocks, kThreads) ? 0 : kDeadlock;
}

"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return cuda_emulation.build(kernels.SOURCE, _LAUNCH, kernels.FUNCTIONS, tmp_path_factory.mktemp("emulation"))


def _case(visible, ratio=1, heads=32):
    return index_cases.prefill_case(visible, ratio, heads, torch.device("cpu"))


def _check(library, case, block_groups, skip=0, seen=None):
    """Against the reference, with as many groups of rows per block; `seen`: what the kernel is told is visible."""
    rows, heads, _ = case.q.shape
    maxima = room_for_maxima(rows, case.width, case.q.device)
    for part in maxima:
        part.fill_(torch.nan)
    tile = kernels.choose_tile(rows, heads, case.width, 1)._replace(groups=block_groups)
    image = kernels.image_for(rows, tile, case.q.device).fill_(255)
    tensors = (*case.arguments(), case.requests[:1], case.visible if seen is None else seen)
    status = kernels.call(library, *tensors, image, maxima, case.ratio, case.width, skip, tile, 0)
    cuda_emulation.check(status)
    index_cases.check_prefill(case, maxima, skip)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_groups_taken_in_turn(library, seed, monkeypatch):
    # More groups than stages, and a last one that is not full.
    monkeypatch.setenv("EMULATION_SEED", str(seed))
    _check(library, _case([140 + i for i in range(39)]), block_groups=10)


@pytest.mark.parametrize("heads", [1, 13, 16, 20, 33, 64])
def test_heads(library, heads):
    _check(library, _case([1, 40, 130, 257, 300], heads=heads), block_groups=2)


@pytest.mark.parametrize("ratio", [1, 2])
def test_lengths(library, ratio):
    _check(library, _case([0, 1, 7, 8, 9, 63, 64, 65, 127, 128, 129, 255, 256, 257], ratio), block_groups=4)


def test_some_groups_see_a_tile(library):
    case = _case([300, 3, 0, 20] + [5] * 4 + [0] * 8 + [10, 300, 260, 0] + [256] * 3)
    case.visible, case.requests = case.visible.int(), case.requests.int()
    case.req_to_token = case.req_to_token.long()
    _check(library, case, block_groups=6)


def test_skip(library):
    _check(library, _case([128, 129, 300, 5, 7, 100, 128, 2, 500]), block_groups=3, skip=128)


def test_visible_past_the_width(library):
    # What a row wrote past the width would lie in the next row, which sees nothing.
    case = _case([192, 192, 0, 150])
    case.width = 192
    _check(library, case, block_groups=1, seen=case.visible + torch.tensor([0, 1000, 0, 0]))


def test_tiles():
    for rows in (1, 5, 70, 4096, 100_000):
        for heads in (1, 16, 17, 32, 64):
            for width in (64, 16384, 1 << 20):
                tile = kernels.choose_tile(rows, heads, width, 132)
                assert heads <= tile.heads <= max(16, 2 * heads)
                assert 1 <= tile.groups <= 128
