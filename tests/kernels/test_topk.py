"""Selections by their properties: in range, unique, ascending, min(selected) >= max(unselected), ties low first."""

import kernel_cases as cases
import pytest
import torch

from sglang_csa2.kernels import triton_topk

LENGTHS = cases.pick(
    [0, 1, 2, 7, 127, 128, 129, 255, 256, 257, 511, 512, 513, 4095, 4096, 4097, 16383, 16384], [0, 1, 9, 129, 513]
)
KEEP = cases.pick([512], [16])[0]
KINDS = ["normal", "ties", "constant", "nan", "negative", "infinite"]


@pytest.fixture(params=["triton_topk", "cuda_topk"])
def kernels(request):
    return cases.module_of(request.param)


def _scores(rows, width, kind, device):
    x = torch.randn(rows, width, device=device)
    if kind == "ties":
        return (x * 4).round() / 4
    if kind == "constant":
        return torch.where(x > 2, 1.0, 0.0) * torch.sign(x)
    if kind == "nan":
        return x.masked_fill(torch.rand_like(x) < 0.3, torch.nan)
    if kind == "negative":
        return -x.abs() * 1e-30
    if kind == "infinite":
        return x.masked_fill(x > 1.5, torch.inf).masked_fill(x < 0.5, -torch.inf)
    return x


def _maxima(scores, visible, size):
    """Maxima of whole groups over visible entries, NaN past them and NaN skipped, as index_scores leaves them."""
    seen = torch.arange(scores.shape[1], device=scores.device) < visible[:, None]
    masked = scores.masked_fill(~seen | scores.isnan(), -torch.inf)
    maxima = masked.view(len(scores), -1, size).amax(-1)
    groups = torch.arange(maxima.shape[1], device=scores.device)
    return maxima.masked_fill(groups * size >= visible[:, None], torch.nan)


def check_choice(chosen, scores, allowed, k):
    """chosen int [k] of one row's scores, of which `allowed` may be taken."""
    scores = scores.double()
    allowed = allowed & ~scores.isnan()
    count = int((chosen >= 0).sum())
    assert count == min(k, int(allowed.sum()))
    assert (chosen[count:] == -1).all()
    kept = chosen[:count].long()
    assert (kept.diff() > 0).all()
    assert allowed[kept].all()
    rest = allowed.clone()
    rest[kept] = False
    if count and rest.any():
        threshold = scores[kept].min()
        assert threshold >= scores[rest].max()
        tied_left, tied_kept = (rest & (scores == threshold)).nonzero(), kept[scores[kept] == threshold]
        if len(tied_left):
            assert tied_kept.max() < tied_left.min(), "a tie went to the higher position"


WIDE = [0, 1, 513, 4095, 4096, 4097, 16385, 65537, 131073, 524287, 1048575, 1048576]


def _blocks(length, num_blocks, device):
    blocks = torch.full((num_blocks,), -1, dtype=torch.int32, device=device)
    some = torch.randperm(-(-length // 8), device=device)[:num_blocks].sort().values
    blocks[: len(some)] = some.int()
    return blocks


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_blocks", cases.pick([1, 65, 2048], [20]))
def test_select_in_blocks(num_blocks, kind, kernels, device):
    lengths = [*LENGTHS, *cases.pick([131073, 1048576], [5000])]
    check_select_in_blocks(kernels, lengths, num_blocks, KEEP, kind, device)


def check_select_in_blocks(kernels, lengths, num_blocks, keep, kind, device):
    visible = torch.tensor(lengths, device=device)
    blocks = torch.stack([_blocks(length, num_blocks, device) for length in lengths])
    compact = _scores(len(lengths), num_blocks * 8, kind, device)
    positions = blocks.repeat_interleave(8, 1) * 8 + torch.arange(num_blocks * 8, device=device) % 8
    live = (blocks.repeat_interleave(8, 1) >= 0) & (positions < visible[:, None]) & ~compact.isnan()
    block_max = compact.masked_fill(~live, -torch.inf).view(len(lengths), -1, 8).amax(-1)
    chosen = kernels.select_in_blocks(compact, block_max, blocks, visible, keep)
    for row, length in enumerate(lengths):
        entries = (blocks[row, :, None] * 8 + torch.arange(8, device=device)).flatten().long()
        there = (blocks[row].repeat_interleave(8) >= 0) & (entries < length)
        # The choice in terms of compact columns.
        column_of = {int(entry): column for column, entry in enumerate(entries.tolist()) if there[column]}
        if length <= min(keep, num_blocks * 8):
            # All that the row sees fits: scores are not asked.
            assert chosen[row].tolist() == [*range(length), *[-1] * (keep - length)]
            continue
        columns = torch.tensor([column_of.get(entry, -1) for entry in chosen[row].tolist()], device=device)
        check_choice(columns, compact[row], there, keep)


@pytest.mark.parametrize("keep_newest", [True, False])
@pytest.mark.parametrize("kind", ["normal", "ties", "constant", "infinite"])
@pytest.mark.parametrize(
    ("lengths", "keep"), cases.pick([(LENGTHS, 16), (LENGTHS, 512), (LENGTHS, 2048), (WIDE, 512), (WIDE, 2048)],
                                    [(LENGTHS, 16)])
)  # fmt: skip
def test_best_blocks(lengths, keep, kind, keep_newest, kernels, device):
    check_best_blocks(kernels, lengths, keep, kind, keep_newest, device)


def check_best_blocks(kernels, lengths, keep, kind, keep_newest, device):
    visible = torch.tensor(lengths, device=device)
    width = -(-max(lengths) // 64) * 64
    scores = _scores(len(lengths), width, kind, device)
    block_max, tile_max = _maxima(scores, visible, 8), _maxima(scores, visible, 64)
    chosen = kernels.best_blocks(block_max, tile_max, visible, keep, keep_newest=keep_newest)
    for row, length in enumerate(lengths):
        blocks = -(-length // 8)
        ranked = block_max[row]
        if keep_newest:
            assert blocks == 0 or blocks - 1 in chosen[row]
            # With the newest block above all others, a plain choice.
            ranked = ranked.nan_to_num(posinf=1e30, neginf=-1e30)
            ranked[blocks - 1 : blocks] = torch.inf
        check_choice(chosen[row], ranked, torch.arange(width // 8, device=device) < blocks, keep)


@pytest.mark.parametrize("ratio", [1, 2])
def test_compressed_slots(ratio, device):
    req_to_token, _ = cases.paged_context(4, 5000, device)
    positions = torch.randint(0, 5000 // ratio, (6, 100), device=device, dtype=torch.int32)
    positions[torch.rand(6, 100, device=device) < 0.3] = -1
    requests = torch.randint(0, 4, (6,), device=device)
    want = req_to_token[requests[:, None], positions.clamp(min=0).long() * ratio].long() // ratio
    have = triton_topk.compressed_slots(positions, req_to_token, requests, ratio)
    assert torch.equal(have, want.masked_fill(positions < 0, -1))


def test_refusals(kernels, device):
    visible = torch.zeros(1, dtype=torch.int64, device=device)
    blocks = torch.zeros(1, 64, device=device)
    with pytest.raises(ValueError, match="k = 4096"):
        kernels.best_blocks(blocks, blocks[:, :8].contiguous(), visible, 4096, keep_newest=True)
    with pytest.raises(ValueError, match="float32"):
        kernels.best_blocks(blocks.half(), blocks[:, :8].contiguous(), visible, 16, keep_newest=True)
    with pytest.raises(ValueError, match="tile_max must have shape"):
        kernels.best_blocks(blocks, blocks, visible, 16, keep_newest=True)
