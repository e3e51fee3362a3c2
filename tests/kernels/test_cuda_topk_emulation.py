"""The CUDA C++ selection on the CPU, emulated (`cuda_emulation.h`): the GPU tests at small sizes."""

from types import SimpleNamespace

import cuda_emulation
import kernel_cases as cases
import pytest
import torch
from test_topk import KINDS, check_best_blocks, check_choice, check_select_in_blocks

from sglang_csa2.kernels import cuda_topk as kernels

pytestmark = cuda_emulation.needs_compiler

_LAUNCH = """
cudaError_t launch(bool select, const Params& params, int rows, bool, cudaStream_t) {
  static_assert(sizeof(Shared) <= emulation::kSharedBytes);
  const auto kernel = select ? select_in_blocks_kernel : best_blocks_kernel;
  return emulation::launch([=] { kernel(params); }, rows, kThreads);
}

"""
DEVICE = torch.device("cpu")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return cuda_emulation.build(kernels.SOURCE, _LAUNCH, kernels.FUNCTIONS, tmp_path_factory.mktemp("emulation"))


def _emulated(library, direct):
    """The kernels' module on the CPU."""

    def best_blocks(block_max, tile_max, visible, k, *, keep_newest):
        chosen = torch.full((len(visible), k), -77, dtype=torch.int32)
        status = kernels.call_best_blocks(library, block_max, tile_max, visible, keep_newest, direct, chosen, 0)
        cuda_emulation.check(status)
        return chosen

    def select_slots(scores, block_max, blocks, visible, k, *table):
        chosen = torch.full((len(visible), k), -77, dtype=torch.int32)
        slots = torch.full((len(visible), k), -77, dtype=torch.int64) if table else None
        tensors = (scores, block_max, blocks, visible)
        cuda_emulation.check(kernels.call_select(library, *tensors, direct, chosen, slots, table or None, 0))
        return chosen, slots

    def select_in_blocks(*arguments):
        return select_slots(*arguments)[0]

    return SimpleNamespace(best_blocks=best_blocks, select_in_blocks=select_in_blocks, select_slots=select_slots)


@pytest.mark.parametrize("direct", [64, 8192])
@pytest.mark.parametrize("kind", KINDS)
def test_select_in_blocks(library, kind, direct):
    lengths = [0, 1, 9, 128, 129, 2000, 20000]
    check_select_in_blocks(_emulated(library, direct), lengths, 200, 128, kind, DEVICE)


@pytest.mark.parametrize(("num_blocks", "keep"), [(1, 16), (2048, 512), (512, 512)])
def test_select_sizes(library, num_blocks, keep):
    check_select_in_blocks(_emulated(library, 8192), [17, 4097, 1048576], num_blocks, keep, "ties", DEVICE)


@pytest.mark.parametrize("keep_newest", [True, False])
@pytest.mark.parametrize("kind", ["normal", "ties", "constant", "infinite"])
@pytest.mark.parametrize("direct", [64, 8192])
def test_best_blocks(library, direct, kind, keep_newest):
    lengths = [0, 1, 127, 128, 129, 511, 4097, 16384]
    check_best_blocks(_emulated(library, direct), lengths, 16, kind, keep_newest, DEVICE)


@pytest.mark.parametrize(("keep", "keep_newest"), [(2048, True), (512, False), (1, True)])
def test_best_blocks_of_long_rows(library, keep, keep_newest):
    check_best_blocks(_emulated(library, 8192), [65537, 1048575, 1048576], keep, "normal", keep_newest, DEVICE)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_barriers(library, seed, monkeypatch):
    monkeypatch.setenv("EMULATION_SEED", str(seed))
    check_best_blocks(_emulated(library, 64), [16383], 100, "ties", True, DEVICE)


def test_values_far_apart_and_close(library):
    # Three rounds of bins, and equal values down to the last bit.
    wide = torch.cat([torch.logspace(-37, 37, 2000), -torch.logspace(-37, 37, 2000), torch.full((96,), -0.0)])
    close = (torch.arange(4096, dtype=torch.int32) // 3 + 0x3F800000).view(torch.float32)
    far = close.clone()
    far[0], far[1] = 3e38, -3e38
    for row in (wide, close, far):
        scores = row[torch.randperm(4096)].view(1, -1).contiguous()
        blocks = torch.arange(512, dtype=torch.int32).view(1, -1)
        best = scores.view(1, -1, 8).amax(-1)
        visible = torch.tensor([4096], dtype=torch.int32)
        for direct in (64, 8192):
            for k in (1, 100, 511):
                chosen = _emulated(library, direct).select_in_blocks(scores, best, blocks, visible, k)
                check_choice(chosen[0], scores[0], torch.ones(4096, dtype=torch.bool), k)


@pytest.mark.parametrize(("ratio", "dtype"), [(1, torch.int32), (2, torch.int64)])
def test_slots(library, ratio, dtype):
    req_to_token, _ = cases.paged_context(4, 5000, DEVICE)
    requests = torch.tensor([2, 0, 3]).to(dtype)
    visible = torch.tensor([0, 40, 2500]).to(dtype)
    blocks = torch.randperm(312)[:200].sort().values.int().repeat(3, 1)
    scores = torch.randn(3, 1600)
    position = blocks.repeat_interleave(8, 1) * 8 + torch.arange(1600) % 8
    best = scores.masked_fill(position >= visible[:, None], -torch.inf).view(3, -1, 8).amax(-1)
    table = (req_to_token.to(dtype), requests, ratio)
    positions, slots = _emulated(library, 64).select_slots(scores, best, blocks, visible, 64, *table)
    want = req_to_token[requests[:, None].long(), positions.clamp(min=0).long() * ratio].long() // ratio
    assert torch.equal(slots, want.masked_fill(positions < 0, -1))
    assert (positions >= 0).sum(1).tolist() == [0, 40, 64]
