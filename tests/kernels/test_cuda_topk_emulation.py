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
  static_assert(sizeof(Shared) <= emulation::kSharedBytes && sizeof(ClusterShared) <= emulation::kSharedBytes);
  const Kernel kernel = choose_kernel(select, params);
  if (params.split == 0) return emulation::launch([=] { kernel(params); }, rows, kThreads);
  return emulation::launch([=] { kernel(params); }, rows * params.split, kClusterThreads, params.split);
}

"""
DEVICE = torch.device("cpu")
# What a row of one block narrows by levels from on, and the blocks of a row's cluster.
FORMS = [(64, 0), (8192, 0), (0, 1), (0, 2), (0, 8)]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return cuda_emulation.build(kernels.SOURCE, _LAUNCH, kernels.FUNCTIONS, tmp_path_factory.mktemp("emulation"))


def _emulated(library, direct, split=0):
    """The kernels' module on the CPU, in one of its forms."""

    def best_blocks(block_max, tile_max, visible, k, *, keep_newest):
        chosen = torch.full((len(visible), k), -77, dtype=torch.int32)
        status = kernels.call_best_blocks(library, block_max, tile_max, visible, keep_newest, direct, split, chosen, 0)
        cuda_emulation.check(status)
        return chosen

    def select_slots(scores, block_max, blocks, visible, k, *table):
        chosen = torch.full((len(visible), k), -77, dtype=torch.int32)
        slots = torch.full((len(visible), k), -77, dtype=torch.int64) if table else None
        tensors = (scores, block_max, blocks, visible)
        cuda_emulation.check(kernels.call_select(library, *tensors, direct, split, chosen, slots, table or None, 0))
        return chosen, slots

    def select_in_blocks(*arguments):
        return select_slots(*arguments)[0]

    return SimpleNamespace(best_blocks=best_blocks, select_in_blocks=select_in_blocks, select_slots=select_slots)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_select_in_blocks(library, kind, form):
    lengths = [0, 1, 9, 128, 129, 2000, 20000]
    check_select_in_blocks(_emulated(library, *form), lengths, 200, 128, kind, DEVICE)


@pytest.mark.parametrize("form", [(8192, 0), (0, 1), (0, 4), (0, 8)])
@pytest.mark.parametrize(("num_blocks", "keep"), [(1, 16), (2048, 512), (512, 512)])
def test_select_sizes(library, num_blocks, keep, form):
    check_select_in_blocks(_emulated(library, *form), [17, 4097, 1048576], num_blocks, keep, "ties", DEVICE)


@pytest.mark.parametrize("keep_newest", [True, False])
@pytest.mark.parametrize("kind", ["normal", "ties", "constant", "infinite"])
@pytest.mark.parametrize("form", FORMS)
def test_best_blocks(library, form, kind, keep_newest):
    lengths = [0, 1, 127, 128, 129, 511, 4097, 16384]
    check_best_blocks(_emulated(library, *form), lengths, 16, kind, keep_newest, DEVICE)


@pytest.mark.parametrize("form", [(8192, 0), (0, 8), (0, 16)])
@pytest.mark.parametrize(
    ("keep", "keep_newest", "kind"),
    [
        (2048, True, "normal"),
        (512, False, "ties"),
        (1, True, "normal"),
        (2048, False, "constant"),
        (512, True, "infinite"),
    ],
)
def test_best_blocks_of_long_rows(library, keep, keep_newest, kind, form):
    check_best_blocks(_emulated(library, *form), [65537, 1048575, 1048576], keep, kind, keep_newest, DEVICE)


@pytest.mark.parametrize("kind", ["ties", "constant", "infinite"])
def test_ties_across_the_blocks_of_a_cluster(library, kind):
    check_best_blocks(_emulated(library, 0, 4), [60_000], 2000, kind, True, DEVICE)
    check_select_in_blocks(_emulated(library, 0, 4), [65_536], 1000, 500, kind, DEVICE)


@pytest.mark.parametrize("form", [(64, 0), (0, 1), (0, 4)])
@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5, 6])
def test_barriers(library, seed, form, monkeypatch):
    monkeypatch.setenv("EMULATION_SEED", str(seed))
    check_best_blocks(_emulated(library, *form), [16383, 700, 65536], 100, "ties", True, DEVICE)


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
        for form in FORMS:
            for k in (1, 100, 511):
                chosen = _emulated(library, *form).select_in_blocks(scores, best, blocks, visible, k)
                check_choice(chosen[0], scores[0], torch.ones(4096, dtype=torch.bool), k)


@pytest.mark.parametrize("form", [(64, 0), (0, 1), (0, 2)])
@pytest.mark.parametrize(("ratio", "dtype"), [(1, torch.int32), (2, torch.int64)])
def test_slots(library, ratio, dtype, form):
    req_to_token, _ = cases.paged_context(4, 5000, DEVICE)
    requests = torch.tensor([2, 0, 3]).to(dtype)
    visible = torch.tensor([0, 40, 2500]).to(dtype)
    blocks = torch.randperm(312)[:200].sort().values.int().repeat(3, 1)
    scores = torch.randn(3, 1600)
    position = blocks.repeat_interleave(8, 1) * 8 + torch.arange(1600) % 8
    best = scores.masked_fill(position >= visible[:, None], -torch.inf).view(3, -1, 8).amax(-1)
    table = (req_to_token.to(dtype), requests, ratio)
    positions, slots = _emulated(library, *form).select_slots(scores, best, blocks, visible, 64, *table)
    want = req_to_token[requests[:, None].long(), positions.clamp(min=0).long() * ratio].long() // ratio
    assert torch.equal(slots, want.masked_fill(positions < 0, -1))
    assert (positions >= 0).sum(1).tolist() == [0, 40, 64]


def test_the_split_follows_rows_and_width():
    def split(rows, width):
        return kernels.choose_split(rows, width, 132)

    assert [split(1, width) for width in (2048, 4096, 8192, 16384, 131072)] == [1, 2, 4, 8, 8]
    assert [split(rows, 16384) for rows in (8, 32, 66, 67, 132, 133, 8192)] == [8, 4, 4, 2, 2, 2, 2]
    assert [split(rows, 4096) for rows in (66, 67, 264, 8192)] == [2, 1, 1, 1]
    # Narrower clusters could not hold these rows.
    assert [split(rows, 32768) for rows in (67, 8192)] == [2, 2]
    assert [split(rows, 65536) for rows in (66, 67)] == [4, 0]
    assert [split(rows, 131072) for rows in (33, 34)] == [8, 0]
