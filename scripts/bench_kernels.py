"""Time the CUDA kernels: CUDA-graph replays over rotating inputs, medians in microseconds.

    python scripts/bench_kernels.py [attention] [logits] [topk] [stores] [prefill] [--tune]

Inputs are random and rotate, so that caches do not flatter a kernel. `--tune` times attention and logits over
candidate tiles. Beside each time stands the floor: the bytes a kernel must move, at the copy rate measured first.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "kernels"))
import kernel_cases as cases
from graph_timing import copy_rate, median_us

from sglang_csa2.kernels import triton_index_scores as scores
from sglang_csa2.kernels import triton_pool_pairs as pool
from sglang_csa2.kernels import triton_sparse_attention as attention
from sglang_csa2.kernels import triton_store as store
from sglang_csa2.kernels import triton_topk as topk
from sglang_csa2.kernels.triton_sparse_attention import Tile
from sglang_csa2.layout import INDEX_K, MAIN_KV, SWA_KV

DEVICE = torch.device("cuda")
SCALE = 512**-0.5


class Attention:
    def __init__(self, rows: int, heads: int, slots: int = 1 << 19):
        self.rows, self.heads = rows, heads
        self.swa = cases.swa_cache(1 << 16, DEVICE)
        self.main = cases.main_cache(1 << 16, DEVICE).repeat(slots >> 16, 1)
        self.swa = self.swa.repeat(2, 1)
        self.inputs = [self._inputs() for _ in range(8)]
        self.bytes = rows * (128 * SWA_KV.bytes + 512 * MAIN_KV.bytes + heads * 512 * 4)

    def _inputs(self):
        q = torch.randn(self.rows, self.heads, 512, device=DEVICE).bfloat16()
        swa = torch.randint(0, len(self.swa), (self.rows, 128), device=DEVICE)
        main = torch.randint(0, len(self.main), (self.rows, 512), device=DEVICE)
        return q, swa, main

    def calls(self, tile: Tile | None = None):
        sink = torch.randn(self.heads, device=DEVICE)
        return [
            lambda q=q, a=a, b=b: attention.sparse_attention(q, self.swa, a, self.main, b, sink, SCALE, tile=tile)
            for q, a, b in self.inputs
        ]


ATTENTION_ROWS = [1, 4, 16, 32, 64, 128, 256, 512]
TILES = [
    (64, 64, 8, 3), (64, 64, 8, 2), (64, 32, 8, 3), (32, 64, 8, 3), (16, 32, 4, 3), (16, 64, 8, 3), (16, 32, 8, 3),
]  # fmt: skip


def bench_attention(rate: float) -> None:
    print("attention, us  (rows: time / byte floor; TFLOP/s)")
    for heads in (64, 16, 8):
        for rows in ATTENTION_ROWS:
            case = Attention(rows, heads)
            time = median_us(case.calls())
            flops = rows * heads * 640 * 512 * 4
            tile = attention.choose_tile(rows, heads, 640, 90)
            print(
                f"  heads {heads:3} rows {rows:4} {time:8.1f} / {case.bytes / rate:6.1f}  {flops / time / 1e6:6.1f}",
                tuple(tile),
                flush=True,
            )


def _tune_tiles(rows: int, heads: int) -> list[Tile]:
    tiles = []
    for tile_heads, keys, warps, stages in TILES:
        if tile_heads > max(64, heads):
            continue
        programs = rows * -(-heads // tile_heads)
        for splits in (1, 2, 4, 8):
            if splits == 1 or 100 <= programs * splits <= 600 or rows == 1:
                tiles.append(Tile(tile_heads, keys, splits, warps, stages))
    return tiles


def tune_attention(rows_list: list[int], heads_list: list[int]) -> None:
    for heads in heads_list:
        for rows in rows_list:
            case = Attention(rows, heads, 1 << 18)
            found = []
            for tile in _tune_tiles(rows, heads):
                try:
                    found.append((median_us(case.calls(tile), 5), tuple(tile)))
                except Exception as error:
                    print("failed", tile, type(error).__name__, str(error)[:100])
            found.sort()
            print(f"tune heads {heads} rows {rows}:", *(f"{time:.1f}{tile}" for time, tile in found), flush=True)


class Logits:
    """Rows of distinct requests with `entries` each, ratio 1."""

    def __init__(self, rows: int, entries: int):
        self.rows, self.entries = rows, entries
        pages = rows * entries // 64
        self.cache = cases.index_cache(1 << 16, DEVICE).repeat(-(-pages // 1024) + 1, 1)
        order = torch.randperm(rows * entries // 256, device=DEVICE).view(rows, -1)
        self.req_to_token = (order[..., None] * 256 + torch.arange(256, device=DEVICE)).flatten(1).int()
        self.q = [torch.randn(rows, 32, 128, device=DEVICE).bfloat16() for _ in range(2)]
        self.weights = (torch.randn(rows, 32, device=DEVICE) * 0.02).bfloat16()
        self.requests = torch.arange(rows, device=DEVICE)
        self.visible = torch.full((rows,), entries, device=DEVICE)
        self.bytes = rows * entries * INDEX_K.bytes
        self.flops = rows * entries * 32 * 128 * 2

    def call(self, q):
        return scores.block_maxima(
            q, self.weights, self.cache, self.req_to_token, self.requests, self.visible, 1, self.entries
        )

    def calls(self):
        return [partial(self.call, q) for q in self.q]

    def candidate_calls(self, blocks):
        fixed = (self.weights, self.cache, self.req_to_token, self.requests, self.visible, 1, blocks)
        return [partial(scores.index_scores_candidates, q, *fixed) for q in self.q]


LOGITS = [
    (1, 1 << 14), (1, 1 << 16), (1, 1 << 20), (8, 1 << 14), (8, 1 << 16), (8, 1 << 20), (32, 1 << 16), (128, 1 << 14),
]  # fmt: skip


def bench_logits(rate: float) -> None:
    print("index logits, us  (rows x entries: time / byte floor; TFLOP/s)")
    for rows, entries in LOGITS:
        case = Logits(rows, entries)
        time = median_us(case.calls())
        line = f"  {rows:4} x {entries:8} {time:8.1f} / {case.bytes / rate:6.1f}  {case.flops / time / 1e6:6.1f}"
        if entries > 16384:
            blocks = topk.best_blocks(*case.call(case.q[0]), case.visible, 2048, keep_newest=True)
            line += f"   candidates of it {median_us(case.candidate_calls(blocks)):8.1f}"
        print(line, flush=True)


def tune_logits() -> None:
    for rows, entries in ((1, 1 << 20), (8, 1 << 20), (8, 1 << 16), (32, 1 << 14)):
        case = Logits(rows, entries)
        found = []
        for keys, warps in ((64, 4), (128, 4), (128, 8)):
            for programs in (4, 8, 12, 24, 48):
                scores._DECODE_TILE = {"BLOCK_N": keys, "num_warps": warps}
                scores._DECODE_PROGRAMS = 132 * programs
                found.append((median_us(case.calls(), 5), (keys, warps, programs)))
        found.sort()
        print(f"tune logits {rows} x {entries}:", *(f"{time:.1f}{tile}" for time, tile in found), flush=True)


SCANS = [(1, 1 << 14), (8, 1 << 14), (128, 1 << 14), (1, 1 << 16), (8, 1 << 16), (1, 1 << 20), (8, 1 << 20)]


def bench_topk() -> None:
    print("best blocks of a scan, us  (rows x entries: 512, and 2048 with the newest)")
    for rows, width in SCANS:
        values = [torch.randn(rows, width, device=DEVICE) for _ in range(2)]
        visible = torch.full((rows,), width, device=DEVICE)
        maxima = [(x.view(rows, -1, 8).amax(-1), x.view(rows, -1, 64).amax(-1)) for x in values]
        own, pool = (
            median_us([partial(topk.best_blocks, *m, visible, k, keep_newest=newest) for m in maxima])
            for k, newest in ((512, False), (2048, True))
        )
        beside = median_us([partial(torch.topk, m[0], min(512, m[0].shape[1])) for m in maxima])
        print(f"  {rows:4} x {width:8} {own:8.1f} {pool:8.1f}   torch.topk of the maxima {beside:8.1f}", flush=True)
    for rows in (1, 8, 128):
        compact = torch.randn(rows, 1 << 14, device=DEVICE)
        maxima = compact.view(rows, -1, 8).amax(-1)
        blocks = torch.arange(2048, device=DEVICE).int().mul(7).repeat(rows, 1)
        visible = torch.full((rows,), 1 << 20, device=DEVICE)
        chosen = topk.select_in_blocks(compact, maxima, blocks, visible, 512)
        table = torch.zeros(rows, 1 << 20, dtype=torch.int32, device=DEVICE)
        requests = torch.arange(rows, device=DEVICE)
        time = median_us([partial(topk.select_in_blocks, compact, maxima, blocks, visible, 512)] * 4)
        slots = median_us([partial(topk.compressed_slots, chosen, table, requests, 1)] * 4)
        print(f"  {rows:4} pools of 16384 {time:8.1f}   slots {slots:6.1f}", flush=True)


def bench_stores(rate: float) -> None:
    print("stores, us  (rows: swa, main, index, pool_decode)")
    weight = torch.ones(512, device=DEVICE).bfloat16()
    index_weight = weight[:128].contiguous()
    table = cases.rope_table(4096, DEVICE)
    for rows in (1, 128, 512, 8192):
        kv = torch.randn(rows, 512, device=DEVICE).bfloat16()
        key = kv[:, :128].contiguous()
        wide = torch.randn(rows, 1024, device=DEVICE)
        positions = torch.randint(0, 4096, (rows,), device=DEVICE)
        slots = torch.randperm(rows, device=DEVICE)
        swa, main, index = (torch.zeros(rows + 64, n, dtype=torch.uint8, device=DEVICE) for n in (528, 288, 64 * 68))
        pending = torch.zeros(2 * rows, 1024, device=DEVICE)
        calls = (
            partial(store.swa_store, kv, weight, 0.0, table, positions, slots, swa),
            partial(store.main_kv_store, kv, table, positions, slots, main),
            partial(store.index_k_store, key, index_weight, 0.0, table, positions, slots, index),
            partial(pool.pool_decode, wide[:, :512], wide[:, 512:], positions, slots, slots, pending, 2, weight, 0.0),
        )
        times = " ".join(f"{median_us([call] * 4):7.1f}" for call in calls)
        print(f"  {rows:5} {times}   swa floor {rows * 1552 / rate:6.1f}", flush=True)


def bench_prefill() -> None:
    print("prefill, ms")
    for rows, entries in ((2048, 1 << 14), (2048, 1 << 16), (512, 1 << 17)):
        case = Logits(1, entries)
        q = torch.randn(rows, 32, 128, device=DEVICE).bfloat16()
        weights = (torch.randn(rows, 32, device=DEVICE) * 0.02).bfloat16()
        visible = torch.full((rows,), entries, device=DEVICE)
        scan = partial(
            scores.block_maxima_prefill,
            q, weights, case.cache, case.req_to_token, case.requests, visible, 1, entries,
        )  # fmt: skip
        time, maxima = median_us([scan], 5), scan()
        choose = partial(topk.best_blocks, *maxima, visible, 512, keep_newest=False)
        blocks, requests = choose(), case.requests.expand(rows).contiguous()
        again = partial(
            scores.index_scores_candidates,
            q, weights, case.cache, case.req_to_token, requests, visible, 1, blocks,
        )  # fmt: skip
        logits, best = again()
        select = partial(topk.select_in_blocks, logits, best, blocks, visible, 512)
        rate = rows * entries * 32 * 128 * 2 / time / 1e6
        print(
            f"  scan {rows} x {entries}: {time / 1e3:.2f} ({rate:.0f} TFLOP/s), best blocks "
            f"{median_us([choose], 5) / 1e3:.2f}, again {median_us([again], 5) / 1e3:.2f}, "
            f"top-k {median_us([select], 5) / 1e3:.2f}",
            flush=True,
        )
    for rows in (1024, 4096):
        case = Attention(rows, 64)
        time = median_us(case.calls()[:2], 5)
        rate = rows * 64 * 640 * 512 * 4 / time / 1e6
        print(f"  attention {rows} rows: {time / 1e3:.3f} ({rate:.0f} TFLOP/s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="*", default=["attention", "logits", "topk", "stores", "prefill"])
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16, 128])
    parser.add_argument("--heads", type=int, nargs="*", default=[64, 16])
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.tune:
        if "attention" in options.what:
            tune_attention(options.rows, options.heads)
        if "logits" in options.what:
            tune_logits()
        return
    rate = copy_rate()
    print(torch.cuda.get_device_name(), f"copy {rate / 1e6:.2f} TB/s")
    for what in options.what:
        bench = globals()[f"bench_{what}"]
        bench(rate) if what in ("attention", "logits", "stores") else bench()


if __name__ == "__main__":
    main()
