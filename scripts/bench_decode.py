"""Time decode kernels beside their peers in one run: CUDA-graph replays over rotating inputs, medians.

    python scripts/bench_decode.py attention [--rows 1 64 512] [--heads 64 16 8] [--json out.json] [--sweep]
    python scripts/bench_decode.py scores | select | layer [--shapes 1x16384 8x1048576] [--late] [--json out.json]
    python scripts/bench_decode.py memory [--shapes 256x1048576]

attention: the CUDA C++ and the Triton kernel over packed records, and FlashMLA (the `sgl-flash-mla` wheel) over its
584-byte V4 records, with fewer heads padded to 64 as a server pads them. FlashMLA once as its own call with a schedule
kept for the shape, and once as csa2's `v4` route calls it in the layers after a forward's first. The same keys, as near
as V4 records hold them. Each kernel is first held to its error bound against float64, and FlashMLA's outputs to within
a few percent of ours: where either fails nothing is timed and the exit status is 1. `--sweep` times every tile instead.

scores, select, layer: the indexer's kernels, one by one and as the Full, candidate-source and Reindex layers run them
(bench_index.py). memory: what such a layer holds beyond its inputs at most.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "kernels"))
import bench_index
import kernel_cases as cases
from graph_timing import copy_rate, median_us, medians_us

from sglang_csa2.kernels import cuda_build, cuda_sparse_attention, flash_mla_decode, triton_sparse_attention
from sglang_csa2.kernels.cuda_sparse_attention import Tile
from sglang_csa2.kernels.records import decode_main_kv, decode_swa_kv
from sglang_csa2.kernels.records_v4 import encode_v4, pages_of, write_v4
from sglang_csa2.layout import MAIN_KV, SWA_KV, V4

try:
    import flash_mla
except ImportError:
    flash_mla = None

DEVICE = torch.device("cuda")
SCALE = 512**-0.5
WINDOW, TOPK = 128, 512
ROTATION = 8
# V4 records round keys to other grids: their outputs differ by 2 % (relative, over all elements).
PEER_DIFFERENCE = 0.05
_V4_PAGE = 64
_V4_COLUMNS = ("flashmla", "v4 route")


def v4_pages(keys: torch.Tensor) -> torch.Tensor:
    """bf16 [n, 512] -> a cache uint8 [n / 64, 64, 584] of their V4 records."""
    shape = len(keys) // _V4_PAGE, V4.page_bytes(V4.main, _V4_PAGE)
    cache = pages_of(torch.zeros(shape, dtype=torch.uint8, device=keys.device), _V4_PAGE)
    write_v4(cache, torch.arange(len(keys), device=keys.device), encode_v4(keys))
    return cache


class Caches:
    """Random records, and the same keys as V4 records."""

    def __init__(self, swa_slots: int = 1 << 17, main_slots: int = 1 << 19, distinct: int = 1 << 15):
        self.swa, self.main = cases.swa_cache(distinct, DEVICE), cases.main_cache(distinct, DEVICE)
        v4 = [v4_pages(decode_swa_kv(self.swa)), v4_pages(decode_main_kv(self.main))] if flash_mla else []
        self.swa = self.swa.repeat(swa_slots // distinct, 1)
        self.main = self.main.repeat(main_slots // distinct, 1)
        if flash_mla:
            self.v4_swa, self.v4_main = (
                self._repeat(pages, slots // distinct) for pages, slots in zip(v4, (swa_slots, main_slots), strict=True)
            )

    @staticmethod
    def _repeat(pages: torch.Tensor, times: int) -> torch.Tensor:
        stride = pages.stride(0)
        whole = pages.as_strided((len(pages), stride), (stride, 1)).repeat(times, 1)
        return pages_of(whole, pages.shape[1])


class Attention:
    def __init__(self, caches: Caches, rows: int, heads: int):
        self.caches, self.rows, self.heads = caches, rows, heads
        self.inputs = [self._inputs() for _ in range(ROTATION)]
        self.sink = torch.randn(heads, device=DEVICE)
        self.bytes = rows * (WINDOW * SWA_KV.bytes + TOPK * MAIN_KV.bytes + heads * 512 * 4)
        self.flops = rows * heads * (WINDOW + TOPK) * 512 * 4

    def _inputs(self):
        q = torch.randn(self.rows, self.heads, 512, device=DEVICE).bfloat16()
        swa = torch.randint(0, len(self.caches.swa), (self.rows, WINDOW), device=DEVICE)
        main = torch.randint(0, len(self.caches.main), (self.rows, TOPK), device=DEVICE)
        return q, swa, main

    def calls(self, op, **options):
        caches = self.caches
        return [
            lambda q=q, a=a, b=b: op(q, caches.swa, a, caches.main, b, self.sink, SCALE, **options)
            for q, a, b in self.inputs
        ]

    def peer_calls(self):
        """FlashMLA's call, its schedule made once per shape as a server does."""
        schedule, _ = flash_mla.get_mla_metadata()
        pad = 64 - self.heads
        sink = torch.nn.functional.pad(self.sink, (0, pad))

        def call(q, swa, main):
            return flash_mla.flash_mla_with_kvcache(
                q=q,
                k_cache=self.caches.v4_swa[:, :, None],
                block_table=None,
                cache_seqlens=None,
                head_dim_v=512,
                tile_scheduler_metadata=schedule,
                softmax_scale=SCALE,
                is_fp8_kvcache=True,
                indices=swa,
                attn_sink=sink,
                extra_k_cache=self.caches.v4_main[:, :, None],
                extra_indices_in_kvcache=main,
                use_legacy=True,
            )[0][:, 0, : self.heads]

        padded = [
            (torch.nn.functional.pad(q, (0, 0, 0, pad))[:, None].contiguous(), a[:, None].int(), b[:, None].int())
            for q, a, b in self.inputs
        ]
        return [lambda args=args: call(*args) for args in padded]

    def route_calls(self):
        """csa2's own call of FlashMLA on the same records, as the layers after a forward's first make it."""
        caches, full = self.caches, torch.full((self.rows,), WINDOW, dtype=torch.int32, device=DEVICE)

        def call(q, swa, main, lists):
            return flash_mla_decode.sparse_attention(
                q, caches.v4_swa, swa, caches.v4_main, main, self.sink, SCALE, lists
            )

        lists = [flash_mla_decode.Lists(full, full - WINDOW + TOPK) for _ in self.inputs]
        return [lambda args=(*inputs, one): call(*args) for inputs, one in zip(self.inputs, lists, strict=True)]

    def exact(self, count: int = 4):
        """float64 outputs of the first rows, and the error of eager bf16 there."""
        q, swa, main = (x[:count] for x in self.inputs[0])
        keys = torch.cat([decode_swa_kv(self.caches.swa[swa]), decode_main_kv(self.caches.main[main])], 1)

        def eager(dtype):
            scores = torch.einsum("nhd,nkd->nhk", q.to(dtype), keys.to(dtype)) * SCALE
            column = self.sink.to(dtype)[None, :, None].expand(len(q), -1, 1)
            weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
            return torch.einsum("nhk,nkd->nhd", weights, keys.to(dtype))

        exact = eager(torch.float64)
        return exact, cases.relative_error(eager(torch.bfloat16), exact)


def disagreement(case: Attention, columns: dict) -> str | None:
    """Why the outputs may not be compared, or None."""
    exact, bound = case.exact()
    outputs = {name: calls[0]() for name, calls in columns.items()}
    for name, out in outputs.items():
        error = cases.relative_error(out[: len(exact)], exact)
        limit = PEER_DIFFERENCE if name in _V4_COLUMNS else cases.SLACK * bound
        if not error <= limit:
            return f"{name}: error {error:.2e} against float64, allowed {limit:.2e}"
        whole = cases.relative_error(out, outputs["cuda"])
        limit = PEER_DIFFERENCE if name in _V4_COLUMNS else 2 * cases.SLACK * bound
        if not whole <= limit:
            return f"{name}: differs from cuda by {whole:.2e}, allowed {limit:.2e}"
    return None


def bench_attention(rows_list: list[int], heads_list: list[int]) -> tuple[list[dict], bool]:
    caches, rate, results, agreed = Caches(), copy_rate(), [], True
    print(f"{torch.cuda.get_device_name()}, copy {rate / 1e6:.2f} TB/s")
    print("attention, us, 128 + 512 keys: cuda, triton, FlashMLA, cuda / FlashMLA, v4 route, v4 route / FlashMLA;")
    print("  floor by bytes, TFLOP/s, tile")
    for heads in heads_list:
        for rows in rows_list:
            case = Attention(caches, rows, heads)
            columns = {
                "cuda": case.calls(cuda_sparse_attention.sparse_attention),
                "triton": case.calls(triton_sparse_attention.sparse_attention),
            }
            if flash_mla and heads <= 64:
                columns["flashmla"], columns["v4 route"] = case.peer_calls(), case.route_calls()
            problem = disagreement(case, columns)
            if problem:
                print(f"  heads {heads:3} rows {rows:4}  OUTPUTS DISAGREE, not timed: {problem}", flush=True)
                agreed = False
                continue
            times = medians_us(columns)
            tile = cuda_sparse_attention.choose_tile(rows, heads, WINDOW + TOPK, 132)
            result = {"heads": heads, "rows": rows, **times, "floor_us": case.bytes / rate, "tile": tuple(tile)}
            result["tflops"] = case.flops / times["cuda"] / 1e6
            ratio = ""
            if "flashmla" in times:
                result["ratio"] = times["cuda"] / times["flashmla"]
                result["route_ratio"] = times["v4 route"] / times["flashmla"]
                ratio = f"{times['flashmla']:8.1f} {result['ratio']:6.2f} {times['v4 route']:8.1f}"
                ratio += f" {result['route_ratio']:6.3f}"
            results.append(result)
            print(
                f"  heads {heads:3} rows {rows:4} {times['cuda']:8.1f} {times['triton']:8.1f} {ratio}"
                f"   {result['floor_us']:6.1f} {result['tflops']:6.0f}  {tuple(tile)}",
                flush=True,
            )
    return results, agreed


def sweep_tiles(rows: int, heads: int) -> list[Tile]:
    """Every tile worth a try: more than one tile of heads, which decodes a row as often, only where rows are few."""
    tiles = []
    for size in (16, 64):
        head_tiles = -(-heads // size)
        for splits in (1, 2, 3, 4, 5, 6, 8, 10):
            blocks = rows * head_tiles * splits
            if size < 4 * heads and (splits == 1 or blocks <= 200) and (head_tiles == 1 or blocks <= 200):
                tiles.append(Tile(size, splits))
    return tiles


def sweep_attention(rows_list: list[int], heads_list: list[int]) -> tuple[list[dict], bool]:
    caches, results, agreed = Caches(), [], True
    for heads in heads_list:
        for rows in rows_list:
            case, found = Attention(caches, rows, heads), []
            exact, bound = case.exact()
            for tile in sweep_tiles(rows, heads):
                try:
                    calls = case.calls(cuda_sparse_attention.sparse_attention, tile=tile)
                    error = cases.relative_error(calls[0]()[: len(exact)], exact)
                    if not error <= cases.SLACK * bound:
                        raise ValueError(f"error {error:.2e}, allowed {cases.SLACK * bound:.2e}")
                    found.append((median_us(calls, 5), tuple(tile)))
                except Exception as problem:
                    print(f"failed: {tile}: {str(problem)[:100]}", flush=True)
                    agreed = False
            peer = median_us(case.peer_calls(), 5) if flash_mla and heads <= 64 else float("nan")
            found.sort()
            results.append({"heads": heads, "rows": rows, "flashmla": peer, "tiles": found})
            best = " ".join(f"{time:.1f}{tile}" for time, tile in found[:8])
            print(f"heads {heads} rows {rows} (FlashMLA {peer:.1f}): {best}", flush=True)
    return results, agreed


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["attention", "memory", *bench_index.STEPS])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 16, 32, 64, 128, 256, 512])
    parser.add_argument("--heads", type=int, nargs="*", default=[64, 16, 8])
    parser.add_argument("--shapes", nargs="*", help="rows x entries, such as 8x65536")
    parser.add_argument("--late", action="store_true", help="let no kernel start while the one before it ends")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    cuda_build.EARLY_START = not options.late
    if options.what == "attention":
        run = sweep_attention if options.sweep else bench_attention
        results, agreed = run(options.rows, options.heads)
    elif options.what == "memory":
        shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes or ["256x1048576"]]
        results, agreed = [row for shape in shapes for row in bench_index.memory(*shape)], True
    else:
        shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes or ()] or bench_index.SHAPES
        results, agreed = bench_index.bench_index(options.what, shapes)
    if options.json:
        options.json.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), options.what: results}, indent=1))
    return 0 if agreed else 1


if __name__ == "__main__":
    sys.exit(main())
