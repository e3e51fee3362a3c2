"""The CUDA C++ decode kernels at small sizes, for compute-sanitizer, which is too slow for whole tests.

    CSA2_NVCC_FLAGS="-lineinfo -DCSA2_EVERY_LANE_ARRIVES" compute-sanitizer --tool racecheck \\
        --kernel-regex kns=index_scores python scripts/sanitize.py scan
    CSA2_NVCC_FLAGS=-lineinfo compute-sanitizer --tool racecheck \\
        --kernel-regex kns=sparse_attention python scripts/sanitize.py attention
    CSA2_NVCC_FLAGS=-lineinfo compute-sanitizer --tool racecheck \\
        --kernel-regex kns=select_cu python scripts/sanitize.py selection

Every form of a kernel that a served size reaches is launched: tiles of 16 and 64 heads, one and two of them, alone, in
clusters and row after row; scans of single rows and of sets, lists of blocks; selections by clusters of 1 to 16, of
short rows and of long ones (lists of at most 2,048 blocks), and by one block, level by level. One form is left out, a
selection that has a whole row in one block's registers: there racecheck (CUDA 13.0) stops with an error of its own.
Results are not looked at here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "kernels"))
import index_cases
import kernel_cases as cases

from sglang_csa2.kernels import cuda_build, cuda_index_decode, cuda_sparse_attention, cuda_topk
from sglang_csa2.kernels.cuda_sparse_attention import Tile

DEVICE = torch.device("cuda")


def attention() -> None:
    slots = 512
    swa_cache, main_cache = cases.swa_cache(slots, DEVICE), cases.main_cache(slots, DEVICE)
    # 140 rows are more than the card has multiprocessors.
    narrow = [(16, 1, 2), (16, 3, 2), (8, 1, 140), (16, 5, 1), (20, 1, 2)]
    for heads, splits, rows in [*narrow, (64, 1, 2), (64, 4, 2), (64, 1, 140), (80, 2, 2)]:
        q = torch.randn(rows, heads, 512, device=DEVICE).bfloat16()
        swa_slots = torch.randint(-1, slots, (rows, 128), device=DEVICE)
        main_slots = torch.randint(-1, slots, (rows, 256), device=DEVICE)
        sink, tile = torch.randn(heads, device=DEVICE), Tile(16 if heads < 64 else 64, splits)
        for main in [(main_cache, main_slots), (None, None)]:
            cuda_sparse_attention.sparse_attention(q, swa_cache, swa_slots, *main, sink, 512**-0.5, tile=tile)


def scan() -> None:
    for group, ratio in [(1, 1), (2, 2), (6, 1)]:
        case = index_cases.Case([0, 130, 5, 9000, 64, *[300] * 6], ratio, 32, DEVICE, rows_per_request=group)
        inputs = (*case.arguments(), case.requests, case.visible, ratio)
        cuda_index_decode.block_maxima(*inputs, case.width, group=group)
        cuda_index_decode.index_scores_candidates(*inputs, _blocks(len(case.requests), case.width // 8, 16))


def selection() -> None:
    cuda_topk.DIRECT = 128
    for split in (0, 1, 2, 4, 8, 16):
        cuda_topk.choose_split = lambda *sizes, split=split: split
        # A thread's vectors: each number is a kernel of its own.
        for vectors in (1, 2, 4, 8):
            width = 2048 * max(split, 1) * vectors
            if width <= 131072:
                _selection(2, width, 512)


def _selection(rows: int, width: int, k: int) -> None:
    """The best of `width` blocks, and of as many scores as there may be listed."""
    block_max = torch.randn(rows, width, device=DEVICE)
    visible = torch.full((rows,), 8 * width - 3, device=DEVICE)
    cuda_topk.best_blocks(block_max, block_max.view(rows, -1, 8).amax(-1), visible, k, keep_newest=True)
    listed = _blocks(rows, width, min(width // 8, 2048))
    scores = torch.randn(rows, listed.shape[1] * 8, device=DEVICE)
    maxima = scores.view(rows, -1, 8).amax(-1)
    table, _ = cases.paged_context(rows, 8 * width, DEVICE)
    cuda_topk.select_slots(scores, maxima, listed, visible, k, table, torch.arange(rows, device=DEVICE), 1)
    cuda_topk.select_in_blocks(scores, maxima, listed, visible, k)


def _blocks(rows: int, of: int, count: int) -> torch.Tensor:
    """int32 [rows, count], ascending in each row."""
    return torch.stack([torch.randperm(of, device=DEVICE)[:count].sort().values for _ in range(rows)]).int()


STEPS = {"attention": attention, "scan": scan, "selection": selection}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("--late", action="store_true", help="let no kernel start while the one before it ends")
    options = parser.parse_args()
    torch.manual_seed(0)
    cuda_build.EARLY_START = not options.late
    STEPS[options.step]()
    torch.cuda.synchronize()
    print(f"{options.step}: done")


if __name__ == "__main__":
    main()
