"""The CUDA C++ decode kernels at small sizes, for compute-sanitizer, which is too slow for whole tests.

    CSA2_NVCC_FLAGS="-lineinfo -DCSA2_EVERY_LANE_ARRIVES" compute-sanitizer --tool racecheck \\
        --kernel-regex kns=index_scores python scripts/sanitize.py scan
    CSA2_NVCC_FLAGS=-lineinfo compute-sanitizer --tool racecheck \\
        --kernel-regex kns=sparse_attention python scripts/sanitize.py attention
    CSA2_NVCC_FLAGS=-lineinfo compute-sanitizer --tool racecheck \\
        --kernel-regex kns=cluster python scripts/sanitize.py selection

Every form of a kernel is launched once: tiles of 16 and 64 heads, alone, in clusters and row after row; scans of single
rows and of sets, lists of blocks; selections by clusters of 1 to 16 and by one block, level by level. One form is left
out, a selection that has a whole row in one block's registers: there racecheck (CUDA 13.0) stops with an error of its
own. Results are not looked at here.
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
    for heads, splits, rows in [(16, 1, 2), (16, 3, 2), (8, 1, 140), (16, 5, 1), (64, 1, 2), (64, 4, 2), (64, 1, 140)]:
        q = torch.randn(rows, heads, 512, device=DEVICE).bfloat16()
        swa_slots = torch.randint(-1, slots, (rows, 128), device=DEVICE)
        main_slots = torch.randint(-1, slots, (rows, 256), device=DEVICE)
        sink, tile = torch.randn(heads, device=DEVICE), Tile(16 if heads <= 16 else 64, splits)
        caches = (swa_cache, swa_slots, main_cache, main_slots)
        cuda_sparse_attention.sparse_attention(q, *caches, sink, 512**-0.5, tile=tile)


def scan() -> None:
    for group, ratio in [(1, 1), (2, 2), (6, 1)]:
        case = index_cases.Case([0, 130, 5, 9000, 64, *[300] * 6], ratio, 32, DEVICE, rows_per_request=group)
        inputs = (*case.arguments(), case.requests, case.visible, ratio)
        cuda_index_decode.block_maxima(*inputs, case.width, group=group)
        cuda_index_decode.index_scores_candidates(*inputs, _blocks(len(case.requests), case.width // 8, 16))


def selection() -> None:
    rows, entries = 2, 1 << 15
    table, _ = cases.paged_context(rows, entries, DEVICE)
    requests, visible = torch.arange(rows, device=DEVICE), torch.full((rows,), entries - 3, device=DEVICE)
    block_max = torch.randn(rows, entries // 8, device=DEVICE)
    listed = _blocks(rows, entries // 8, 512)
    scores = torch.randn(rows, listed.shape[1] * 8, device=DEVICE)
    cuda_topk.DIRECT = 128
    for split in (0, 1, 2, 4, 8, 16):
        cuda_topk.choose_split = lambda *sizes, split=split: split
        cuda_topk.best_blocks(block_max, block_max.view(rows, -1, 8).amax(-1), visible, 512, keep_newest=True)
        maxima = scores.view(rows, -1, 8).amax(-1)
        cuda_topk.select_slots(scores, maxima, listed, visible, 512, table, requests, 1)


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
