"""Time prefill's index selection beside its peers in one run: CUDA-graph replays over rotating inputs, medians.

    python scripts/bench_prefill.py scores [--shapes 8192x16384 ...] [--rounds 7] [--json out.json] [--sweep]
    python scripts/bench_prefill.py reindex [--shapes 8192x65536 8192x524288] [--rounds 7] [--json out.json]
    python scripts/bench_prefill.py memory [--shapes 8192x1048576]

scores: rows of one request, the last of its entries (row i sees entries - rows + i + 1), 32 heads, ratio 1, pages in
random order. Columns: the scan alone (CUDA C++, Triton), the whole selection as the GPU route runs it (scan, best
blocks, their scores, Top-K; one layer that publishes no pool), and the stock host's torch path on Hopper restated (bf16
einsum, relu, weighted sum, Top-K, 1 GiB of products at a time, over keys that are decoded already); where the package
deep_gemm is installed, its FP8 logits alone, a matrix of rows x entries. Rates count visible entries alone.

Before a shape is timed both scans are held to float64 scores on sampled rows, and no entry that a selection left out
may score above one it chose: where that fails nothing is timed and the exit status is 1. `--sweep` times the CUDA C++
scan with other numbers of groups per block instead.

reindex: what a Reindex layer does with the same rows, each with a pool of 2,048 random blocks of its own: scores of the
pool's entries, Top-K and slots. Its time should not follow the context. memory: the most that a selection holds.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "kernels"))
import kernel_cases as cases
from graph_timing import medians_us

from sglang_csa2 import indexer_cuda
from sglang_csa2.kernels import cuda_build, cuda_index_scores
from sglang_csa2.kernels.cuda_index_scores import Tile
from sglang_csa2.kernels.index_scores import gather_index_k
from sglang_csa2.kernels.records import decode_index_k, encode_index_k
from sglang_csa2.layout import INDEX_K

try:
    import deep_gemm
except ImportError:
    deep_gemm = None

DEVICE = torch.device("cuda")
HEADS, TOPK, POOL_BLOCKS, POOL_ENTRIES = 32, 512, 2048, 16384
SHAPES = ["8192x16384", "8192x65536", "4096x131072"]
REINDEX_SHAPES = ["8192x32768", "8192x65536", "8192x131072", "8192x262144", "8192x524288"]
DEFAULTS = {"scores": SHAPES, "reindex": REINDEX_SHAPES, "memory": ["8192x1048576"]}
FORMS = {"cuda": indexer_cuda.cuda_kernels(), "triton": indexer_cuda.triton_kernels()}
ROTATION = 2
SAMPLES = 12
STOCK_BYTES = 1 << 30
# fp32 sums of 32 products in another order than the judge's, relative to a row's greatest score.
TOLERANCE = 1e-5
# FP8 products accumulate in fewer bits; the values here are exact in FP8.
DEEP_GEMM_DIFFERENCE = 0.02


def to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 [..., 128] -> e4m3 and an fp32 scale per vector, a power of two."""
    largest = x.abs().amax(-1, keepdim=True).float().clamp(min=2.0**-100)
    scale = (largest / 256).log2().ceil().exp2()
    return (x / scale).to(torch.float8_e4m3fn), scale[..., 0]


def on_grid(x: torch.Tensor) -> torch.Tensor:
    """bf16 values that an index record can hold."""
    records = encode_index_k(x)
    return decode_index_k(records[..., : INDEX_K.data_bytes], records[..., INDEX_K.data_bytes :])


class Prefill:
    """The last `rows` rows of a request of `entries` entries."""

    def __init__(self, rows: int, entries: int):
        self.rows, self.entries, self.width = rows, entries, -(-entries // 64) * 64
        self.table, slots = cases.paged_context(1, entries, DEVICE)
        self.cache = cases.index_cache(slots, DEVICE)
        self.q = [on_grid(torch.randn(rows, HEADS, 128, device=DEVICE).bfloat16()) for _ in range(ROTATION)]
        self.weights = (torch.randn(rows, HEADS, device=DEVICE) * 0.02).bfloat16()
        self.request = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        self.requests = self.request.expand(rows).contiguous()
        self.visible = torch.arange(entries - rows + 1, entries + 1, device=DEVICE)
        self.keys = gather_index_k(self.cache, self.table[0, :entries].long())
        self.flops = int(self.visible.sum()) * HEADS * 128 * 2

    def scan(self, form, q, **options):
        """The whole scan in one launch."""
        arguments = (q, self.weights, self.cache, self.table, self.request, self.visible, 1, self.width)
        return form.block_maxima_prefill(*arguments, **options)

    def select(self, form, q):
        """Positions, int32 [rows, TOPK], in tiles of rows as the GPU route cuts them."""
        height = max(1, indexer_cuda._TILE_BYTES // (4 * max(self.width // 8, POOL_ENTRIES)))
        return torch.cat([self._select(form, q, slice(top, top + height)) for top in range(0, self.rows, height)])

    def _select(self, form, q, tile):
        visible = self.visible[tile]
        part = (q[tile], self.weights[tile], self.cache, self.table)
        maxima = form.block_maxima_prefill(*part, self.request, visible, 1, self.width, skip=TOPK * 8)
        return self._choose(form, part, tile, form.best_blocks(*maxima, visible, TOPK, keep_newest=False))

    def _choose(self, form, part, tile, blocks):
        visible, requests = self.visible[tile], self.requests[tile]
        scores, best = form.index_scores_candidates(*part, requests, visible, 1, blocks, skip=TOPK)
        return form.select_slots(scores, best, blocks, visible, TOPK, self.table, requests, 1)[0]

    def reindex(self, form, q, pools):
        """Positions, int32 [rows, TOPK], of each row's pool int32 [rows, POOL_BLOCKS]."""
        height = indexer_cuda._TILE_BYTES // (4 * POOL_ENTRIES)
        tiles = [slice(top, top + height) for top in range(0, self.rows, height)]
        return torch.cat(
            [self._choose(form, (q[t], self.weights[t], self.cache, self.table), t, pools[t]) for t in tiles]
        )

    def stock(self, q):
        """Positions, int32 [rows, TOPK], as the stock host finds them where it has no kernel."""
        column = torch.arange(self.entries, device=DEVICE)
        chosen = torch.empty(self.rows, TOPK, dtype=torch.int32, device=DEVICE)
        height = max(1, STOCK_BYTES // (HEADS * self.entries * 2))
        for top in range(0, self.rows, height):
            tile = slice(top, top + height)
            products = torch.einsum("bhd,nd->bhn", q[tile], self.keys)
            scores = (products.relu() * self.weights[tile].unsqueeze(-1)).sum(dim=1).float()
            visible = self.visible[tile, None]
            scores = scores.masked_fill(column[None] >= visible, -torch.inf)
            best = scores.topk(min(TOPK, self.entries), dim=-1, sorted=False).indices.sort(dim=-1).values
            chosen[tile, : best.shape[1]] = torch.where(best < visible, best, -1).int()
        return chosen

    def deep_gemm_calls(self):
        """Calls of the library's scores, fp32 [rows, entries].

        Raises:
            ValueError: they are not the scores.
        """
        keys, ends = to_fp8(self.keys), self.visible.int()
        queries = [to_fp8(q) for q in self.q]
        calls = [
            partial(
                deep_gemm.fp8_mqa_logits, q, keys, self.weights.float() * scale, torch.zeros_like(ends), ends,
                clean_logits=False,
            )
            for q, scale in queries
        ]  # fmt: skip
        row = self.rows - 1
        error = cases.relative_error(calls[0]()[row, : int(self.visible[row])], self.exact(row))
        if not error < DEEP_GEMM_DIFFERENCE:
            raise ValueError(f"error {error:.2e} against float64, allowed {DEEP_GEMM_DIFFERENCE}")
        return calls

    def columns(self):
        named = {}
        if deep_gemm is not None:
            try:
                named["deep_gemm"] = self.deep_gemm_calls()
            except Exception as problem:
                print(f"  DeepGEMM's logits not timed: {type(problem).__name__}: {str(problem)[:200]}", flush=True)
        for name, form in FORMS.items():
            named[f"scan_{name}"] = [partial(self.scan, form, q) for q in self.q]
            named[f"select_{name}"] = [partial(self.select, form, q) for q in self.q]
        return {**named, "stock": [partial(self.stock, self.q[0])]}

    def exact(self, row: int) -> torch.Tensor:
        """float64 scores of what a row of the first input sees."""
        keys = self.keys[: int(self.visible[row])].double()
        products = (self.q[0][row].double() @ keys.T).relu()
        return self.weights[row].double() @ products


def disagreement(case: Prefill) -> str | None:
    """Why the outputs may not be compared, or None."""
    rows = [*torch.randperm(case.rows)[:SAMPLES].tolist(), 0, case.rows - 1]
    scores = {row: case.exact(row) for row in rows}
    for name, form in FORMS.items():
        maxima, chosen = case.scan(form, case.q[0]), case.select(form, case.q[0])
        for row, exact in scores.items():
            limit = TOLERANCE * exact.abs().max()
            for part, size in zip(maxima, (8, 64), strict=True):
                padded = torch.nn.functional.pad(exact, (0, -len(exact) % size), value=-torch.inf)
                want = padded.view(-1, size).amax(-1)
                error = (part[row, : len(want)] - want).abs().max()
                if not error <= limit:
                    return f"{name}: a maximum of {size} in row {row} is {error:.2e} off, allowed {limit:.2e}"
            problem = violation(chosen[row], exact, limit)
            if problem:
                return f"{name}: row {row} {problem}"
    return None


def violation(chosen: torch.Tensor, exact: torch.Tensor, limit: torch.Tensor) -> str | None:
    """What is wrong with a row's choice: its number, its order, or an entry left out that scores more than one kept."""
    positions = chosen[chosen >= 0].long()
    if len(positions) != min(TOPK, len(exact)) or (positions.diff() <= 0).any() or positions.max() >= len(exact):
        return "chose too few or too many, not in order, or what it does not see"
    left = torch.ones_like(exact, dtype=torch.bool)
    left[positions] = False
    above = (exact[left] > exact[positions].min() + limit).sum()
    return f"left out {above} entries above its threshold" if above else None


def bench_scores(shapes: list[tuple[int, int]], rounds: int) -> tuple[list[dict], bool]:
    results, agreed = [], True
    print(
        "index scores, ms: scan cuda, triton; selection cuda, triton; stock; scan TFLOP/s cuda, triton; stock / select"
    )
    for rows, entries in shapes:
        case = Prefill(rows, entries)
        problem = disagreement(case)
        if problem:
            print(f"  {rows} x {entries}  OUTPUTS DISAGREE, not timed: {problem}", flush=True)
            agreed = False
            continue
        times = medians_us(case.columns(), rounds)
        tile = cuda_index_scores.choose_tile(rows, HEADS, case.width, cuda_build.multiprocessors(DEVICE))
        result = {"rows": rows, "entries": entries, **times, "tile": tuple(tile), "violations": 0}
        for name in FORMS:
            result[f"tflops_{name}"] = case.flops / times[f"scan_{name}"] / 1e6
        result["speedup"] = times["stock"] / times["select_cuda"]
        result["scan_speedup"] = times["scan_triton"] / times["scan_cuda"]
        results.append(result)
        columns = ("scan_cuda", "scan_triton", "select_cuda", "select_triton", "stock")
        print(
            f"  {rows:5} x {entries:7}",
            *(f"{times[name] / 1e3:8.3f}" for name in columns),
            f"  {result['tflops_cuda']:4.0f} {result['tflops_triton']:4.0f}  {result['speedup']:5.1f}  {tuple(tile)}",
            f" 0 violations in {SAMPLES + 2} rows",
            f" DeepGEMM's logits {times['deep_gemm'] / 1e3:.3f}" if "deep_gemm" in times else "",
            flush=True,
        )
        del case
        torch.cuda.empty_cache()
    return results, agreed


def sweep_scores(shapes: list[tuple[int, int]], rounds: int) -> tuple[list[dict], bool]:
    results = []
    for rows, entries in shapes:
        case, form = Prefill(rows, entries), FORMS["cuda"]
        columns = {
            str(groups): [partial(case.scan, form, q, tile=Tile(HEADS, groups)) for q in case.q]
            for groups in (8, 16, 32, 48, 64, 96, 128)
        }
        times = medians_us(columns, rounds)
        results.append({"rows": rows, "entries": entries, "groups": times})
        rates = " ".join(f"{groups}: {case.flops / time / 1e6:.0f}" for groups, time in times.items())
        print(f"{rows} x {entries}, TFLOP/s by groups per block: {rates}", flush=True)
    return results, True


def bench_reindex(shapes: list[tuple[int, int]], rounds: int) -> tuple[list[dict], bool]:
    results, agreed = [], True
    print("a Reindex layer's choice in its pool, ms: cuda, triton")
    for rows, entries in shapes:
        case = Prefill(rows, entries)
        seen = (entries - rows) // 8
        pools = torch.stack(
            [torch.randperm(seen, device=DEVICE)[:POOL_BLOCKS].sort().values for _ in range(rows)]
        ).int()
        problem = pool_violation(case, pools)
        if problem:
            print(f"  {rows} x {entries}  OUTPUTS DISAGREE, not timed: {problem}", flush=True)
            agreed = False
            continue
        columns = {name: [partial(case.reindex, form, q, pools) for q in case.q] for name, form in FORMS.items()}
        times = medians_us(columns, rounds)
        results.append({"rows": rows, "entries": entries, **times})
        print(f"  {rows:5} x {entries:7}", *(f"{times[name] / 1e3:8.3f}" for name in FORMS), flush=True)
        del case, columns
        torch.cuda.empty_cache()
    return results, agreed


def bench_memory(shapes: list[tuple[int, int]], rounds: int) -> tuple[list[dict], bool]:
    del rounds
    results = []
    for rows, entries in shapes:
        case = Prefill(rows, entries)
        for name, form in FORMS.items():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            case.select(form, case.q[0])
            torch.cuda.synchronize()
            mib = (torch.cuda.max_memory_allocated() - before) / 2**20
            results.append({"rows": rows, "entries": entries, "kernels": name, "mib": mib})
            print(f"  {rows} x {entries} {name:6} {mib:7.1f} MiB", flush=True)
    return results, True


def pool_violation(case: Prefill, pools: torch.Tensor) -> str | None:
    """What is wrong with some rows' choices in their pools, or None."""
    for name, form in FORMS.items():
        chosen = case.reindex(form, case.q[0], pools)
        for row in torch.randperm(case.rows)[:SAMPLES].tolist():
            exact = case.exact(row)
            allowed = (pools[row, :, None] * 8 + torch.arange(8, device=DEVICE)).flatten().long()
            inside = torch.full_like(exact, -torch.inf)
            inside[allowed] = exact[allowed]
            problem = violation(chosen[row], inside, TOLERANCE * exact.abs().max())
            if problem:
                return f"{name}: row {row} {problem}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=list(DEFAULTS))
    parser.add_argument("--shapes", nargs="*", help="rows x entries, as 8192x16384")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes or DEFAULTS[options.what]]
    print(torch.cuda.get_device_name())
    runs = {"scores": bench_scores, "reindex": bench_reindex, "memory": bench_memory}
    run = sweep_scores if options.sweep else runs[options.what]
    results, agreed = run(shapes, options.rounds)
    if options.json:
        options.json.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), options.what: results}, indent=1))
    return 0 if agreed else 1


if __name__ == "__main__":
    sys.exit(main())
