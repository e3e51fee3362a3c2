"""The CUDA C++ attention on the CPU: its source, with threads as fibers and PTX emulated (`cuda_emulation.h`)."""

import cuda_emulation
import kernel_cases as cases
import pytest
import torch

from sglang_csa2.kernels import cuda_sparse_attention as kernels
from sglang_csa2.kernels.cuda_sparse_attention import Tile

pytestmark = cuda_emulation.needs_compiler

_LAUNCH = """
template <int HEADS>
cudaError_t launch(const Params& params, int multiprocessors, bool, cudaStream_t) {
  const int head_tiles = (params.heads + HEADS - 1) / HEADS, splits = params.splits;
  const bool all = splits > 1 || params.rows < multiprocessors;
  static_assert(sizeof(Shared<HEADS>) <= emulation::kSharedBytes);
  emulation::threads = kConsumers + kProducers;
  emulation::grid_x = all ? params.rows * splits : multiprocessors;
  emulation::kernel = [=] { sparse_attention_kernel<HEADS>(params); };
  const char* seed = getenv("EMULATION_SEED");
  for (int y = 0; y < head_tiles; ++y) {
    for (int x = 0; x < emulation::grid_x; x += splits) {
      if (!emulation::run(x, y, splits, seed ? atoi(seed) : 1)) return kDeadlock;
    }
  }
  return 0;
}

"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return cuda_emulation.build(kernels.SOURCE, _LAUNCH, kernels.FUNCTIONS, tmp_path_factory.mktemp("emulation"))


def _case(rows, heads, **options):
    return cases.attention_case(rows, heads, torch.device("cpu"), slots=800, **options)


def _check(library, case, tile, blocks=132):
    q = case[0]
    out = torch.full((*q.shape[:2], 512), torch.nan, dtype=torch.bfloat16)
    status = kernels.call(library, *case, out, cases.ATTENTION_SCALE, tile, blocks, 0)
    cuda_emulation.check(status)
    cases.check_attention(out, *case)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("heads, tile_heads", [(13, 16), (50, 64)])
def test_rows_taken_in_turn(library, heads, tile_heads, seed, monkeypatch):
    monkeypatch.setenv("EMULATION_SEED", str(seed))
    case = _case(3, heads, topk=200, absent=0.2, dtype=torch.int32)
    _check(library, case, Tile(tile_heads, 1), blocks=1)


@pytest.mark.parametrize("window, topk", [(128, 0), (1, 200), (70, 130)])
@pytest.mark.parametrize("heads, tile_heads", [(20, 16), (64, 64)])
def test_rows_of_unlike_queries_in_turn(library, heads, tile_heads, window, topk):
    q, *rest = _case(4, heads, window=window, topk=topk, absent=0.1)
    q *= torch.tensor([1.0, 30.0, 0.1, 5.0]).view(4, 1, 1)
    _check(library, (q, *rest), Tile(tile_heads, 1), blocks=1)


@pytest.mark.parametrize("heads, tile", [(20, Tile(16, 5)), (64, Tile(64, 3)), (8, Tile(16, 10)), (80, Tile(64, 2))])
def test_splits(library, heads, tile):
    _check(library, _case(1, heads, absent=0.1), tile)


@pytest.mark.parametrize("heads", [16, 64])
def test_absent_keys(library, heads):
    q, swa, swa_slots, main, main_slots, sink = _case(4, heads)
    swa_slots[0], main_slots[0] = -1, -1
    swa_slots[1, 1:], main_slots[1] = -1, -1
    swa_slots[2], main_slots[2, :300] = -1, -1
    main_slots[3, 77:] = -1
    for splits in (1, 2):
        _check(library, (q, swa, swa_slots, main, main_slots, sink), Tile(heads, splits), blocks=2)
        # A sink that takes nothing leaves a row without keys with nothing to divide by.
        out = torch.full_like(q, torch.nan)
        case = (q[:1], swa, swa_slots[:1], main, main_slots[:1], torch.full_like(sink, -torch.inf))
        cuda_emulation.check(kernels.call(library, *case, out, cases.ATTENTION_SCALE, Tile(heads, splits), 2, 0))
        assert not out[0].any()


@pytest.mark.parametrize("window, topk", [(1, 1), (63, 65), (65, 2), (129, 0)])
@pytest.mark.parametrize("heads", [5, 64])
def test_widths(library, heads, window, topk):
    case = _case(2, heads, window=window, topk=topk)
    _check(library, case, Tile(16 if heads <= 16 else 64, 1))


@pytest.mark.parametrize("heads", [8, 64])
def test_swa_only_and_more_splits_than_tiles(library, heads):
    q, swa, swa_slots, _, _, sink = _case(1, heads)
    _check(library, (q, swa, swa_slots, None, None, sink), Tile(max(16, heads), 5))


@pytest.mark.parametrize("heads", [8, 16, 64])
def test_scores_that_grow_and_sinks(library, heads):
    q, *rest, sink = _case(1, heads, topk=200)
    tile = Tile(max(16, heads), 1)
    _check(library, (q * 64, *rest, sink), tile)
    for value in (-1e4, 30.0):
        _check(library, (q, *rest, sink.fill_(value)), tile)


def test_strided_q(library):
    q, *rest = _case(2, 8, topk=64)
    wide = torch.randn(2, 16, 1024).bfloat16()
    wide[:, :8, :512] = q
    _check(library, (wide[:, :8, :512], *rest), Tile(16, 1))
