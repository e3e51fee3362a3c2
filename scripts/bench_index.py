"""The indexer's part of bench_decode.py: scores, selection and whole layers, the CUDA C++ and the Triton kernels.

Every request rotates, so that keys come from device memory and not from L2. Outputs are compared first. Where the host
is installed, its own decode logits (no Top-K, no pool) are timed beside what scans the whole context.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "kernels"))
import kernel_cases as cases
from graph_timing import copy_rate, medians_us

from sglang_csa2.indexer_cuda import Kernels, cuda_kernels, triton_kernels
from sglang_csa2.layout import INDEX_K
from sglang_csa2.reference import quantize_index

try:
    from sglang.kernels.ops.attention.dsv4.fp4_indexer import fp4_index_logits_paged as stock_logits
except ImportError:
    stock_logits = None

DEVICE = torch.device("cuda")
SHAPES = [(1, 1 << 14), (1, 1 << 16), (1, 1 << 20), (8, 1 << 16), (8, 1 << 20), (32, 1 << 16)]
HEADS, TOPK, POOL = 32, 512, 2048
# Distinct keys, beyond what L2 holds.
_COLD_BYTES = 128 << 20
FORMS = {"cuda": cuda_kernels(), "triton": triton_kernels()}
# Near ties may fall either way where scores differ by rounding: the share of a choice that must agree.
AGREEMENT = 0.99
# The host rounds products, weighted products and sums to bf16.
STOCK_DIFFERENCE = 0.02
# Steps that read the whole context.
SCANNING = ("scan", "full", "source")


class Context:
    """`sets` times `rows` requests of `entries` each at ratio 1, and a query for each."""

    def __init__(self, rows: int, entries: int, sets: int | None = None):
        self.rows, self.entries = rows, entries
        self.sets = sets or min(64, max(2, -(-_COLD_BYTES // (rows * entries * INDEX_K.bytes))))
        requests = self.sets * rows
        keys = cases.index_cache(1 << 16, DEVICE)
        pages = -(-requests * entries // 64)
        self.cache = keys.repeat(-(-pages // len(keys)), 1)
        self.req_to_token, _ = cases.paged_context(requests, entries, DEVICE)
        self.q = quantize_index(torch.randn(requests, HEADS, 128)).to(DEVICE)
        self.weights = (torch.randn(requests, HEADS, device=DEVICE) * 0.02).bfloat16()
        self.requests = torch.arange(requests, device=DEVICE)
        self.visible = torch.full((rows,), entries, device=DEVICE)

    def part(self, number: int):
        """q, weights, cache, table, requests and visible of one set."""
        of = slice(number * self.rows, (number + 1) * self.rows)
        return self.q[of], self.weights[of], self.cache, self.req_to_token, self.requests[of], self.visible

    def scan(self, form: Kernels, number: int, skip: int = 0):
        return form.block_maxima(*self.part(number), 1, self.entries, skip=skip)

    def candidates(self, form: Kernels, number: int, blocks):
        return form.index_scores_candidates(*self.part(number), 1, blocks, skip=TOPK)

    def select(self, form: Kernels, number: int, scored, blocks):
        *_, table, requests, visible = self.part(number)
        return form.select_slots(*scored, blocks, visible, TOPK, table, requests, 1)

    def stock(self, number: int):
        """The host's scores, fp32 [rows, entries]."""
        q, weights, cache, table, requests, visible = self.part(number)
        return stock_logits(q, weights, requests, table, visible.int(), cache, 64, self.entries, 1)

    def full(self, form: Kernels, number: int, pool: bool = False):
        """A Full layer; with `pool`, the candidate source."""
        k = POOL if pool else TOPK
        maxima = self.scan(form, number, skip=8 * k)
        blocks = form.best_blocks(*maxima, self.visible, k, keep_newest=pool)
        return self.reindex(form, number, blocks)

    def reindex(self, form: Kernels, number: int, blocks):
        return self.select(form, number, self.candidates(form, number, blocks), blocks)


def _shared(a, b) -> float:
    """The share of the rows' choices that two have in common."""
    common = sum(len(set(x) & set(y) - {-1}) for x, y in zip(a.tolist(), b.tolist(), strict=True))
    return common / max(1, int((a >= 0).sum()))


def _close(a, b) -> bool:
    finite = b > -torch.inf
    return torch.equal(a > -torch.inf, finite) and cases.relative_error(a[finite], b[finite]) < 1e-5


def _scores(context: Context):
    """(step, bytes, calls by form and set, whether outputs agree) of each step."""
    blocks = [
        {k: FORMS["triton"].best_blocks(*context.scan(FORMS["triton"], s), context.visible, k, keep_newest=k == POOL)
         for k in (TOPK, POOL)}
        for s in range(context.sets)
    ]  # fmt: skip
    rows, entries = context.rows, context.entries
    yield (
        "scan",
        rows * entries * INDEX_K.bytes,
        context.scan,
        lambda a, b: all(_close(x, y) for x, y in zip(a, b, strict=True)),
    )
    for k in (TOPK, POOL):
        yield (
            f"listed {k}",
            rows * min(entries, 8 * k) * INDEX_K.bytes,
            lambda form, s, k=k: context.candidates(form, s, blocks[s][k]),
            lambda a, b: _close(a[0], b[0]),
        )


def _selection(context: Context):
    triton = FORMS["triton"]
    maxima = [context.scan(triton, s) for s in range(context.sets)]
    same = lambda a, b: torch.equal(a, b)  # noqa: E731
    for k in (TOPK, POOL):
        yield (
            f"best {k}",
            context.rows * 4 * (context.entries // 64 + 9 * k),
            lambda form, s, k=k: form.best_blocks(*maxima[s], context.visible, k, keep_newest=k == POOL),
            same,
        )
    for k in (TOPK, POOL):
        blocks = [triton.best_blocks(*m, context.visible, k, keep_newest=k == POOL) for m in maxima]
        scored = [context.candidates(triton, s, b) for s, b in enumerate(blocks)]
        yield (
            f"top-k of {k}",
            context.rows * 4 * (10 * k + 3 * TOPK),
            lambda form, s, blocks=blocks, scored=scored: context.select(form, s, scored[s], blocks[s]),
            lambda a, b: torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]),
        )


def _layers(context: Context):
    triton = FORMS["triton"]
    pools = [
        triton.best_blocks(*context.scan(triton, s), context.visible, POOL, keep_newest=True)
        for s in range(context.sets)
    ]
    whole = context.rows * context.entries * INDEX_K.bytes
    agree = lambda a, b: _shared(a[0], b[0]) >= AGREEMENT  # noqa: E731
    yield "full", whole + context.rows * 8 * TOPK * INDEX_K.bytes, context.full, agree
    yield "source", whole + context.rows * 8 * POOL * INDEX_K.bytes, partial(context.full, pool=True), agree
    yield (
        "reindex",
        context.rows * min(context.entries, 8 * POOL) * INDEX_K.bytes,
        lambda form, s: context.reindex(form, s, pools[s]),
        agree,
    )


def _stock_agrees(context: Context) -> bool:
    maxima = context.stock(0)[:, : context.entries].unflatten(1, (-1, 8)).amax(-1)
    return cases.relative_error(maxima, context.scan(FORMS["cuda"], 0).blocks) < STOCK_DIFFERENCE


def memory(rows: int, entries: int) -> list[dict]:
    """Most memory that a decode step's layers hold beyond their inputs, in MiB."""
    context, found = Context(rows, entries, sets=1), []
    pools = FORMS["triton"].best_blocks(*context.scan(FORMS["triton"], 0), context.visible, POOL, keep_newest=True)
    steps = {
        "full": context.full,
        "source": partial(context.full, pool=True),
        "reindex": partial(context.reindex, blocks=pools),
    }
    for form_name, form in FORMS.items():
        for name, step in steps.items():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step(form, 0)
            torch.cuda.synchronize()
            mib = (torch.cuda.max_memory_allocated() - before) / 2**20
            found.append({"rows": rows, "entries": entries, "kernels": form_name, "layer": name, "mib": mib})
            print(f"  {rows} x {entries} {form_name:6} {name:8} {mib:7.1f} MiB", flush=True)
    return found


STEPS: dict[str, Callable] = {"scores": _scores, "select": _selection, "layer": _layers}


def bench_index(what: str, shapes: list[tuple[int, int]]) -> tuple[list[dict], bool]:
    rate, results, agreed = copy_rate(), [], True
    print(f"{torch.cuda.get_device_name()}, copy {rate / 1e6:.2f} TB/s")
    print(f"{what}, us: cuda, triton, triton / cuda; floor by bytes; stock logits, stock / cuda")
    for rows, entries in shapes:
        context = Context(rows, entries)
        for step, size, call, agrees in STEPS[what](context):
            if not agrees(*(call(form, 0) for form in FORMS.values())):
                print(f"  {rows:3} x {entries:8} {step:14} OUTPUTS DISAGREE, not timed", flush=True)
                agreed = False
                continue
            columns = {
                name: [partial(call, form, number) for number in range(context.sets)] for name, form in FORMS.items()
            }
            if stock_logits and step in SCANNING:
                if _stock_agrees(context):
                    columns["stock"] = [partial(context.stock, number) for number in range(context.sets)]
                else:
                    print(f"  {rows:3} x {entries:8} {step:14} STOCK'S LOGITS DISAGREE, not timed", flush=True)
                    agreed = False
            times = medians_us(columns)
            result = {"rows": rows, "entries": entries, "step": step, **times, "floor_us": size / rate}
            results.append(result)
            print(
                f"  {rows:3} x {entries:8} {step:14} {times['cuda']:8.1f} {times['triton']:8.1f} "
                f"{times['triton'] / times['cuda']:6.2f}   {result['floor_us']:6.1f}"
                + (f"   {times['stock']:8.1f} {times['stock'] / times['cuda']:6.1f}" if "stock" in times else ""),
                flush=True,
            )
        del context
        torch.cuda.empty_cache()
    return results, agreed
