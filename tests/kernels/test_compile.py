"""Every kernel compiles ahead of time for each architecture, within its shared memory and without spills.

The few bytes of stack that are allowed are spills outside the loops, and those of sm_90's warpgroup attention, whose
accumulators alone take half of the registers.
"""

import ahead_of_time
import pytest
import torch

from sglang_csa2.kernels import triton_gather, triton_index_scores, triton_pool_pairs, triton_store, triton_topk
from sglang_csa2.kernels import triton_sparse_attention as attention
from sglang_csa2.layout import INDEX_PAGE_BYTES

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU tests compile these kernels anyway")

CAPABILITIES = [80, 89, 90, 100, 120]
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


# What to launch, and the stack bytes that its kernels may use.
GROUPS = {
    "attention": (_attention, 72),
    "index_scores": (_index_scores, 0),
    "topk": (_topk, 72),
    "stores": (_stores, 0),
}


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compile(capability, group, record_property):
    launch, stack_limit = GROUPS[group]
    with ahead_of_time.compiling_for(capability) as compiled:
        launch()
    assert compiled
    for kernel in compiled:
        record_property(kernel.name, str(kernel))
        print(kernel)
        assert kernel.shared <= ahead_of_time.SHARED_LIMIT[capability]
        if kernel.stack is not None:
            assert kernel.stack <= stack_limit, f"{kernel} spills"
