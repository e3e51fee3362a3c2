"""[host] The KV pool: CSA2's buffers per layer and the views that kernels read and write.

A subclass of the host's V4 pool, because the scheduler, the radix cache and its neighbours know that class.
The host already allocates what CSA2 needs once it is told the layout: one SWA buffer per layer, one compressed
buffer and one index-K buffer per kv_source layer, a ring of pending pairs per ratio-2 source and request slot,
all inside the memory-saver region. This class pins the layout, allocates nothing beside it, and replaces the
host's CUDA-only store.

| buffer        | one per        | view                           | owner of the bytes |
|---------------|----------------|--------------------------------|--------------------|
| SWA KV        | layer          | uint8 [slots, 528]             | layout.SWA_KV      |
| main KV       | kv_source      | uint8 [slots, 288]             | layout.MAIN_KV     |
| index K       | kv_source      | uint8 [pages, 64 * 68]         | layout.INDEX_K     |
| pending pairs | ratio-2 source | fp32 [request slots * 2, 1024] | pool_pairs         |

Under `SGLANG_CSA2_KV_LAYOUT=v4` SWA KV and main KV are uint8 [pages, slots, 584], layout.V4_KV in whole pages. Index K
has pages of 128 slots where DeepGEMM scores.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4SingleKVPool, DeepSeekV4TokenToKVPool
from torch import Tensor

from sglang_csa2 import envs
from sglang_csa2.kernels.records_v4 import pages_of
from sglang_csa2.layout import DEEP_GEMM_INDEX_PAGE_SLOTS, INDEX_K, INDEX_PAGE_SLOTS, KV_LAYOUTS, PAGE_TOKENS, Record
from sglang_csa2.ops import Norm, ops_for


class HostLayout(NamedTuple):
    """The host's names of one KV layout: of window KV, of main KV, and its option that leads to the latter."""

    swa: KVLayout
    main: KVLayout
    option: str | None


_HOST_LAYOUTS = {
    "v41": HostLayout(KVLayout.V41_NEW, KVLayout.V41_FP4_NEW, "fp4"),
    "v4": HostLayout(KVLayout.V4, KVLayout.V4, None),
}


def host_layout() -> HostLayout:
    return _HOST_LAYOUTS[envs.kv_layout()]


class PoolError(RuntimeError):
    """The pool the host built is not the one CSA2 reads and writes."""


class Csa2KVPool(DeepSeekV4TokenToKVPool):
    """The target model's pool in a csa2 run. Takes the host's constructor arguments unchanged."""

    def __init__(self, *args, **kwargs):
        if kwargs.get("is_draft_worker"):
            raise PoolError("a draft worker keeps the host's own pool; csa2's is for the target model")
        self.layout, names = KV_LAYOUTS[envs.kv_layout()], host_layout()
        self.index_page_slots = DEEP_GEMM_INDEX_PAGE_SLOTS if envs.deep_gemm_indexer() else INDEX_PAGE_SLOTS
        kwargs["kv_layout"], kwargs["compressed_kv_layout"] = names.swa, names.option
        super().__init__(*args, **kwargs)
        self._check_buffers()
        self._ops = ops_for(torch.device(self.device).type)

    def _make_indexer_pool(self, size: int, page_size: int, *args, **kwargs):
        # The host picks 64 or 128 slots by the libraries it finds; csa2 does by the route that scores.
        del page_size
        return super()._make_indexer_pool(size, self.index_page_slots, *args, **kwargs)

    def _check_buffers(self) -> None:
        if self.page_size != PAGE_TOKENS:
            raise PoolError(f"page size is {self.page_size}, but csa2's records are paged by {PAGE_TOKENS} tokens")
        for ratio, pool in self.kv_pools.items():
            if pool.kv_layout is not host_layout().main:
                raise PoolError(f"the ratio-{ratio} pool has layout {pool.kv_layout}, not {host_layout().main}")
            page_bytes = self.index_page_slots * INDEX_K.bytes
            if self.index_pools[ratio].index_k_with_scale_buffer[0].shape[1] != page_bytes:
                raise PoolError(f"the ratio-{ratio} index-K pool is not paged by {self.index_page_slots} slots")

    # Views -----------------------------------------------------------------

    def swa_cache(self, layer_id: int) -> Tensor:
        """A layer's own window cache, uint8 [slots, 528]."""
        return self._records(self.swa_kv_pool, layer_id, self.layout.swa)

    def main_cache(self, layer_id: int) -> Tensor:
        """The main KV that a layer reads, uint8 [slots, 288]: its kv_source's."""
        item = self.layer_mapping[layer_id]
        return self._records(item.compress_kv_pool, item.compress_layer_id, self.layout.main)

    def _records(self, pool: DeepSeekV4SingleKVPool, layer_id: int, record: Record) -> Tensor:
        buffer = pool.kv_buffer[layer_id]
        # Records lie one by one, or in pages as wide as the buffer's rows.
        return buffer.view(-1, record.bytes) if self.layout.page_align == 1 else pages_of(buffer, pool.page_size)

    def index_cache(self, layer_id: int) -> Tensor:
        """The index K that a layer scores, uint8 [pages, 64 * 68]: its kv_source's."""
        item = self.layer_mapping[layer_id]
        return self.index_pools[item.compress_ratio].index_k_with_scale_buffer[item.compress_layer_id]

    def pending_pairs(self, layer_id: int) -> Tensor:
        """A ratio-2 source's waiting even tokens, fp32 [request slots * ring, 1024], kv then score."""
        return self.compress_state_pools[layer_id].kv_score_buffer.kv_score

    @property
    def pending_ring(self) -> int:
        """Ring rows per request slot in `pending_pairs`."""
        return self.get_ring_size(2)

    # The one store that the model calls on its pool ---------------------------

    def set_swa_key_buffer_radix_fused_norm_rope(
        self,
        layer_id: int,
        swa_loc: Tensor,
        kv: Tensor,
        kv_weight: Tensor,
        eps: float,
        freqs_cis: Tensor,
        positions: Tensor,
    ) -> None:
        """Normalise, rotate, quantize and store window KV: kv bf16 [rows, 512], swa_loc int [rows]."""
        rows = swa_loc.shape[0]
        norm, cache = Norm(kv_weight, eps), self.swa_cache(layer_id)
        self._ops.swa_store(kv[:rows], norm, freqs_cis, positions[:rows], swa_loc, cache)

    def layer_bytes(self) -> dict[str, int]:
        """Allocated bytes by kind of buffer, for planning and logs."""
        pending = [pool.kv_score_buffer.kv_score for pool in self.compress_state_pools if pool is not None]
        return {
            "swa_kv": _nbytes(self.swa_kv_pool.kv_buffer),
            "main_kv": sum(_nbytes(pool.kv_buffer) for pool in self.kv_pools.values()),
            "index_k": sum(_nbytes(pool.index_k_with_scale_buffer) for pool in self.index_pools.values()),
            "pending_pairs": _nbytes(pending),
        }


def _nbytes(buffers: list[torch.Tensor]) -> int:
    return sum(buffer.nbytes for buffer in buffers)
