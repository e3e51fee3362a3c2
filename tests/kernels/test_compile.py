"""Every kernel compiles ahead of time for each architecture, within its shared memory and its recorded figures.

`compile_figures.json` holds registers, stack bytes (spills) and shared bytes of every launch, for one Triton version.
With that version a launch may not use more of any than recorded; a new launch must be recorded first:

    python tests/kernels/test_compile.py        writes the record anew; look at its difference before committing

The stack that some launches have are spills outside the loops, and those of sm_90's warpgroup attention, whose
accumulators alone take half of the registers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ahead_of_time
import pytest
import torch
import triton

from sglang_csa2.kernels import (
    triton_gather,
    triton_gather_v4,
    triton_index_scores,
    triton_pool_pairs,
    triton_store,
    triton_store_v4,
    triton_topk,
)
from sglang_csa2.kernels import triton_sparse_attention as attention
from sglang_csa2.kernels.records_v4 import pages_of
from sglang_csa2.layout import INDEX_PAGE_BYTES, V4

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU tests compile these kernels anyway")

CAPABILITIES = [80, 89, 90, 100, 120]
RECORD = Path(__file__).with_name("compile_figures.json")
ROWS = 200


def _bytes(*shape):
    return torch.empty(shape, dtype=torch.uint8)


def _bf16(*shape):
    return torch.empty(shape, dtype=torch.bfloat16)


def _ints(*shape, dtype=torch.int64):
    return torch.zeros(shape, dtype=dtype)


def _attention():
    for heads in (64, 8):
        attention.sparse_attention(
            _bf16(ROWS, heads, 512),
            _bytes(16, 528),
            _ints(ROWS, 128),
            _bytes(16, 288),
            _ints(ROWS, 512),
            torch.empty(heads),
            512**-0.5,
        )
    q = _bf16(1, 16, 512)
    attention.sparse_attention(q, _bytes(16, 528), _ints(1, 128), None, None, torch.empty(16), 512**-0.5)


def _index_scores():
    q, weights = _bf16(4, 32, 128), _bf16(4, 32)
    common = (q, weights, _bytes(8, INDEX_PAGE_BYTES), _ints(4, 4096, dtype=torch.int32))
    triton_index_scores.block_maxima(*common, _ints(4), _ints(4), 1, 4096)
    triton_index_scores.block_maxima_prefill(*common, _ints(1), _ints(4), 2, 2048)
    triton_index_scores.index_scores_candidates(*common, _ints(4), _ints(4), 1, _ints(4, 2048, dtype=torch.int32))


def _topk():
    visible, wide = _ints(2), 1 << 20
    maxima = torch.empty(2, wide // 8), torch.empty(2, wide // 64)
    triton_topk.best_blocks(*maxima, visible, 2048, keep_newest=True)
    triton_topk.best_blocks(*maxima, visible, 512, keep_newest=False)
    for listed in (512, 2048):
        blocks = _ints(2, listed, dtype=torch.int32)
        scores = torch.empty(2, listed * 8), torch.empty(2, listed)
        triton_topk.select_in_blocks(*scores, blocks, visible, 512)
    triton_topk.compressed_slots(_ints(2, 512, dtype=torch.int32), _ints(4, 64, dtype=torch.int32), visible, 2)


def _stores():
    table, weight = torch.empty(64, 32, dtype=torch.complex64), _bf16(512)
    triton_store.swa_store(_bf16(2, 512), weight, 1e-20, table, _ints(2), _ints(2), _bytes(8, 528))
    for norm in ({}, {"weight": weight, "eps": 1e-20, "normed": _bf16(2, 512)}):
        triton_store.main_kv_store(_bf16(2, 512), table, _ints(2), _ints(2), _bytes(8, 288), **norm)
    pages = _bytes(4, INDEX_PAGE_BYTES)
    triton_store.index_k_store(_bf16(2, 128), _bf16(128), 1e-20, table, _ints(2), _ints(2), pages)
    kv, pending = torch.empty(2, 512), torch.empty(4, 1024)
    triton_pool_pairs.pool_pairs(kv, kv, _ints(2), _ints(2), pending, _ints(2), weight, 1e-20)
    triton_pool_pairs.keep_pending(kv, kv, _ints(2), pending, _ints(2))
    triton_pool_pairs.pool_decode(kv, kv, _ints(2), _ints(2), _ints(2), pending, 2, weight, 1e-20)
    triton_gather.gather_swa_kv(_bytes(8, 528), _ints(5))
    triton_gather.gather_main_kv(_bytes(8, 288), _ints(5))


def _v4():
    table, weight = torch.empty(64, 32, dtype=torch.complex64), _bf16(512)
    pages = pages_of(_bytes(2, V4.page_bytes(V4.main, 128)), 128)
    triton_store_v4.swa_store_v4(_bf16(2, 512), weight, 1e-20, table, _ints(2), _ints(2), pages)
    for norm in ({}, {"weight": weight, "eps": 1e-20, "normed": _bf16(2, 512)}):
        triton_store_v4.main_kv_store_v4(_bf16(2, 512), table, _ints(2), _ints(2), pages, **norm)
    triton_gather_v4.gather_v4(pages, _ints(5))


GROUPS = {"attention": _attention, "index_scores": _index_scores, "topk": _topk, "stores": _stores, "v4": _v4}
FIGURES = ("registers", "stack", "shared")


def figures(capability: int, group: str) -> dict[str, dict[str, int | None]]:
    """Figures of a group's launches by name; a kernel's further launches are numbered."""
    with ahead_of_time.compiling_for(capability) as compiled:
        GROUPS[group]()
    found: dict[str, dict[str, int | None]] = {}
    for kernel in compiled:
        number = sum(name.split("#")[0] == kernel.name for name in found)
        name = f"{kernel.name}#{number}" if number else kernel.name
        found[name] = {figure: getattr(kernel, figure) for figure in FIGURES}
    return found


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compile(capability, group, record_property):
    record = json.loads(RECORD.read_text())
    found = figures(capability, group)
    assert found
    for name, have in found.items():
        record_property(name, str(have))
        assert have["shared"] <= ahead_of_time.SHARED_LIMIT[capability]
        # Another Triton allocates otherwise; without cuobjdump there are no figures of registers.
        if record["triton"] != triton.__version__ or have["registers"] is None:
            continue
        assert name in record["launches"], f"{name} has no recorded figures: record them (see this file's head)"
        recorded = record["launches"][name]
        worse = {figure: (recorded[figure], have[figure]) for figure in FIGURES if have[figure] > recorded[figure]}
        assert not worse, f"{name} uses more than recorded (recorded, now): {worse}"


def test_the_record_is_of_the_pinned_triton():
    """CI compares: its environment has the Triton of the record."""
    pinned = (Path(__file__).parents[2] / "requirements" / "cpu.txt").read_text()
    pinned += (RECORD.parents[2] / "requirements" / "test.txt").read_text()
    assert f"triton=={json.loads(RECORD.read_text())['triton']}" in pinned


if __name__ == "__main__":
    launches: dict[str, dict[str, int | None]] = {}
    for sm in CAPABILITIES:
        for one in GROUPS:
            launches |= figures(sm, one)
    RECORD.write_text(json.dumps({"triton": triton.__version__, "launches": launches}, indent=1) + "\n")
    print(f"{len(launches)} launches recorded in {RECORD.name}", file=sys.stderr)
