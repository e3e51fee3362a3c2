"""The pool and its budget: csa2's buffers, nothing beside them, 890 bytes per token for V4.1-Flash."""

from __future__ import annotations

import json

import pytest
import torch
from harness import REPOSITORY, Bench, installed_host

from sglang_csa2.config import Csa2Config
from sglang_csa2.layer_plan import LayerPlan
from sglang_csa2.layout import INDEX_K, INDEX_PAGE_BYTES, MAIN_KV, SWA_KV, global_bytes_per_token, swa_bytes_per_slot


@pytest.fixture(scope="module")
def bench():
    return Bench(pages=10)


def test_the_hosts_budget_counts_our_bytes():
    """The host's own configurator, in the default SWA-cap mode, with V4.1-Flash's sources."""
    installed_host()
    from sglang.srt.model_executor.pool_configurator import DSV4PoolConfigurator

    plan = LayerPlan.from_config(
        Csa2Config.from_hf(json.loads((REPOSITORY / "configs" / "deepseek-v4.1-flash.json").read_text()))
    )
    configurator = object.__new__(DSV4PoolConfigurator)
    configurator._unified = configurator.encoder_replay = False
    configurator.page_size, configurator.swa_cap_tokens, configurator.swa_ratio = 256, 1024, 0.1
    configurator.low_ratio_index_bytes, configurator.num_layers_total = INDEX_K.bytes, len(plan.layers)
    configurator.attn_head_dim, configurator.indexer_head_dim, configurator.ring_sizes = 512, 128, {2: 2}
    configurator.stage_owner_layers = {2: [2, 8, 14], 1: [20]}
    configurator.bytes_per_swa_token = configurator._get_bytes_per_swa_token()
    assert configurator._get_bytes_per_full_token() == global_bytes_per_token(plan) == 890
    assert configurator.bytes_per_swa_token == swa_bytes_per_slot(plan) == 40 * 528


def test_one_buffer_per_source_and_nothing_else(bench):
    pool = bench.pool
    assert {ratio: len(kv.kv_buffer) for ratio, kv in pool.kv_pools.items()} == {1: 1, 2: 1}
    assert [pool.source_layer_of(layer) for layer in range(2, 10)] == [2, 2, 2, 5, 5, 5, 5, 5]
    for layer in range(2, 10):
        source = pool.source_layer_of(layer)
        assert pool.main_cache(layer).data_ptr() == pool.main_cache(source).data_ptr()
        assert pool.index_cache(layer).data_ptr() == pool.index_cache(source).data_ptr()
    assert pool.main_cache(2).data_ptr() != pool.main_cache(5).data_ptr()
    assert len({pool.swa_cache(layer).data_ptr() for layer in range(10)}) == 10
    assert [i for i, ring in enumerate(pool.compress_state_pools) if ring is not None] == [2]
    assert pool.unified_kv_pool is None and pool.request_window is None and not pool.uniform_fp8


def test_every_allocated_byte_is_accounted_for(bench):
    pool = bench.pool
    buffers = [*pool.swa_kv_pool.kv_buffer]
    for ratio in (1, 2):
        buffers += [*pool.kv_pools[ratio].kv_buffer, *pool.index_pools[ratio].index_k_with_scale_buffer]
    pending = pool.compress_state_pools[2].kv_score_buffer.kv_score
    assert sum(pool.layer_bytes().values()) == sum(b.nbytes for b in buffers) + pending.nbytes
    tokens = 10 * 256
    # The host reserves 256 slots at either ratio.
    assert pool.main_cache(5).shape == (tokens + 256, MAIN_KV.bytes)
    assert pool.main_cache(2).shape == (tokens // 2 + 256, MAIN_KV.bytes)
    assert pool.swa_cache(0).shape == (tokens + 256, SWA_KV.bytes)
    assert pool.index_cache(5).shape[1] == INDEX_PAGE_BYTES
    assert all(buffer.dtype is torch.uint8 for buffer in buffers)


def test_index_pages_cover_every_slot(bench):
    """The last token's slot lies inside the index pages at both ratios."""
    last = 10 * 256 + 255
    assert bench.pool.index_cache(5).shape[0] * 64 > last
    assert bench.pool.index_cache(2).shape[0] * 64 > last // 2


def test_a_draft_pool_is_refused():
    installed_host()
    from sglang_csa2.pool import Csa2KVPool, PoolError

    with pytest.raises(PoolError, match="draft worker"):
        Csa2KVPool(is_draft_worker=True)


def test_the_pool_is_what_the_hosts_neighbours_know(bench):
    from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool

    pool = bench.pool
    assert isinstance(pool, DeepSeekV4TokenToKVPool) and isinstance(pool, BaseSWAKVPool)
    assert pool.needs_paged_swa_allocator and pool.swa_req_ring_size is None
    assert pool.pd_kv_layout() == "v41_new,c1:v41_fp4_new,c2:v41_fp4_new"
