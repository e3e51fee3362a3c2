"""Time csa2's operations beside the installed FlashInfer wheel's on the same inputs: CUDA-graph replays, medians.

    python scripts/bench_routes.py [--rows 1 8 32 128] [--contexts 131072 1048576] [--json out.json]

Of the wheel (flashinfer-python 0.7.2) these functions are for V4-family shapes, by their signatures and docstrings:

| function                              | does                       | cards      | compared here                 |
|---------------------------------------|----------------------------|------------|-------------------------------|
| `top_k_ragged_transform`              | top-k of rows with lengths | any        | both top-k steps              |
| `deepseek_v41_decode`                 | 528 + 288 by pages of 64   | 10.0       | decode attention              |
| `prepare_sparse_mqa_logits`           | scores of blocks           | 10.0, 10.3 | no: packed keys of its own    |
| `trtllm_batch_decode_sparse_mla_dsv4` | 512-byte pools; packed     | 10.x; 12.x | no: other records; not served |
| `dsa_indexer_topk`                    | scores and top-k, training | 10.x       | no: bf16 keys                 |
| `dsa_sparse_attention`                | 576 dims, training         | 10.x       | no: no sink                   |

So on Hopper only the top-k kernels apply; csa2's are those that would be served on the card. A top-k's answer is held
to its definition before it is timed (as many as there are, unique, min(selected) >= max(others)): where one is wrong
nothing is timed and the exit status is 1. A function that does not run on this card is reported with its own words.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "kernels"))
import kernel_cases as cases
from graph_timing import medians_us

from sglang_csa2.kernels import cuda_build, cuda_topk, triton_sparse_attention, triton_topk
from sglang_csa2.kernels.triton_records import compute_capability
from sglang_csa2.layout import MAIN_KV, SWA_KV, Record

try:
    import flashinfer
except ImportError:
    flashinfer = None

DEVICE = torch.device("cuda")
TOPK, POOL, BLOCK = 512, 2048, 8
ROTATION = 4


# Calls by column, and what the last calls' answers are held to: scores, lengths and k, or None for each other.
Case = tuple[dict[str, list[Callable[[], torch.Tensor]]], tuple[torch.Tensor, torch.Tensor, int] | None]


def wrong(chosen: torch.Tensor, scores: torch.Tensor, lengths: torch.Tensor, k: int) -> str | None:
    """Why these are not the k best of each row's first `lengths` scores, or None."""
    for row, length in zip(range(min(len(scores), 8)), lengths.tolist(), strict=False):
        kept = chosen[row][chosen[row] >= 0].long()
        if len(kept) != min(k, length) or len(kept.unique()) != len(kept) or (kept >= length).any():
            return f"row {row} has {len(kept)} of {min(k, length)}, or some twice, or some past its length"
        others = torch.ones(length, dtype=torch.bool, device=scores.device)
        others[kept] = False
        if others.any() and scores[row, kept].min() < scores[row, :length][others].max():
            return f"row {row} leaves out a better one"
    return None


def add_flashinfer(
    columns: dict[str, list[Callable[[], torch.Tensor]]], scores: torch.Tensor, lengths: torch.Tensor, k: int
) -> None:
    """FlashInfer's calls: its results in an order that it repeats, and in any, where it may choose CUB's kernel."""
    # The lower index wins a tie, as in csa2; graph-safe, because a decode is captured.
    options = {"tie_break": 1, "dsa_graph_safe": True}
    lengths, offsets = lengths.int(), torch.zeros(len(lengths), dtype=torch.int32, device=lengths.device)
    for column, ordered in (("flashinfer", True), ("in any order", False)):
        columns.setdefault(column, []).append(
            lambda ordered=ordered: flashinfer.top_k_ragged_transform(
                scores, offsets, lengths, k, deterministic=ordered, **options
            )
        )


def served_topk() -> ModuleType:
    return triton_topk if cuda_build.missing(compute_capability(DEVICE)) else cuda_topk


def pool_topk(rows: int) -> Case:
    """Top-512 of a pool's 16,384 scores: ours gets them by block, all blocks in order, so that both name entries."""
    columns: dict[str, list[Callable[[], torch.Tensor]]] = {"csa2": []}
    visible = torch.full((rows,), POOL * BLOCK, device=DEVICE)
    blocks = torch.arange(POOL, dtype=torch.int32, device=DEVICE).expand(rows, -1).contiguous()
    selecting = served_topk()
    for _ in range(ROTATION):
        scores = torch.randn(rows, POOL * BLOCK, device=DEVICE)
        maxima = scores.unflatten(1, (-1, BLOCK)).amax(-1)
        columns["csa2"].append(lambda s=scores, m=maxima: selecting.select_in_blocks(s, m, blocks, visible, TOPK))
        add_flashinfer(columns, scores, visible, TOPK)
    return columns, (scores, visible, TOPK)


def best_blocks(rows: int, context: int) -> Case:
    """The 2,048 best blocks of a context by their maxima."""
    columns: dict[str, list[Callable[[], torch.Tensor]]] = {"csa2": []}
    visible = torch.full((rows,), context, device=DEVICE)
    number = visible // BLOCK
    selecting = served_topk()
    for _ in range(ROTATION):
        maxima = torch.randn(rows, context // BLOCK, device=DEVICE)
        tiles = maxima.unflatten(1, (-1, triton_topk.TILE_BLOCKS)).amax(-1)
        columns["csa2"].append(lambda m=maxima, t=tiles: selecting.best_blocks(m, t, visible, POOL, keep_newest=False))
        add_flashinfer(columns, maxima, number, POOL)
    return columns, (maxima, number, POOL)


def split_pages(records: torch.Tensor, record: Record) -> torch.Tensor:
    """Records [n, bytes] as FlashInfer's pages of 64: every record's data, then every record's scales."""
    pages = records.view(-1, 64, record.bytes)
    data, scales = pages[..., : record.data_bytes], pages[..., record.data_bytes :]
    return torch.cat([data.flatten(1), scales.flatten(1)], 1).view(-1, 64, 1, record.bytes)


def decode_attention(rows: int) -> Case:
    from flashinfer.deepseek_v41 import deepseek_v41_decode

    q, swa, swa_slots, main, main_slots, sink = cases.attention_case(rows, 64, DEVICE, slots=1 << 14)
    inputs = (swa, swa_slots, main, main_slots, sink, cases.ATTENTION_SCALE)
    theirs = (split_pages(swa, SWA_KV), split_pages(main, MAIN_KV), swa_slots[:, :].int(), main_slots.int(), sink)
    plan = deepseek_v41_decode(q[:, None], *theirs)[2]
    columns = {
        "csa2": [lambda: triton_sparse_attention.sparse_attention(q, *inputs)],
        "flashinfer": [lambda: deepseek_v41_decode(q[:, None], *theirs, plan=plan)[0][:, 0]],
    }
    return columns, None


def bench(name: str, make: Callable[[], Case], results: list[dict]) -> bool:
    try:
        columns, checked = make()
        outputs = {column: calls[-1]() for column, calls in columns.items()}
    except Exception as problem:
        print(f"  {name}: not on this card: {type(problem).__name__}: {str(problem).splitlines()[0][:160]}", flush=True)
        results.append({"name": name, "error": str(problem)[:400]})
        return True
    if checked is not None:
        found = {column: problem for column, out in outputs.items() if (problem := wrong(out, *checked))}
    else:
        error = cases.relative_error(outputs["flashinfer"], outputs["csa2"])
        found = {} if error < 0.02 else {"flashinfer": f"differs from csa2 by {error:.2e}"}
    if found:
        print(f"  {name}: WRONG, not timed: {found}", flush=True)
        return False
    times = medians_us(columns)
    results.append({"name": name, **times})
    theirs = {column: us for column, us in times.items() if column != "csa2"}
    listed = ", ".join(f"{column} {us:.1f}" for column, us in theirs.items())
    ratio = times["csa2"] / min(theirs.values())
    print(f"  {name}: csa2 {times['csa2']:.1f} us, {listed}; csa2 / best of them {ratio:.2f}", flush=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--contexts", type=int, nargs="*", default=[131072, 1048576], help="entries of best blocks")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if flashinfer is None:
        print("flashinfer-python is not installed: there is nothing to compare with")
        return 1
    torch.manual_seed(0)
    results: list[dict] = []
    served = served_topk().__name__.rsplit(".", 1)[-1]
    print(f"{torch.cuda.get_device_name()}, flashinfer {flashinfer.__version__}, top-k of csa2: {served}")
    agreed = True
    for rows in options.rows:
        cases_of_rows = {f"top-{TOPK} of {POOL * BLOCK} scores": partial(pool_topk, rows)}
        for context in options.contexts:
            cases_of_rows[f"best {POOL} of {context // BLOCK} blocks"] = partial(best_blocks, rows, context)
        cases_of_rows["decode attention"] = partial(decode_attention, rows)
        for name, make in cases_of_rows.items():
            agreed &= bench(f"{name}, {rows} rows", make, results)
    if options.json:
        options.json.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "routes": results}, indent=1))
    return 0 if agreed else 1


if __name__ == "__main__":
    sys.exit(main())
