"""[host] The KV pool: CSA2's buffers per layer and the views that kernels read and write.

A subclass of the host's V4 pool, because the scheduler, the radix cache and its neighbours know that class.
The host already allocates what CSA2 needs once it is told the layout: one SWA buffer per layer, one compressed
buffer and one index-K buffer per kv_source layer, a ring of pending pairs per ratio-2 source and request slot,
all inside the memory-saver region. This class pins the layout, allocates nothing beside it, and replaces the
host's CUDA-only store.

| buffer        | one per        | view                       | owner of the bytes |
|---------------|----------------|----------------------------|--------------------|
| SWA KV        | layer          | uint8 [slots, 528]         | layout.SWA_KV      |
| main KV       | kv_source      | uint8 [slots, 288]         | layout.MAIN_KV     |
| index K       | kv_source      | uint8 [pages, 64 * 68]     | layout.INDEX_K     |
| pending pairs | ratio-2 source | fp32 [request slots * 2, 1024] | pool_pairs     |
"""

from __future__ import annotations

import torch
from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from torch import Tensor

from sglang_csa2.layout import INDEX_PAGE_BYTES, INDEX_PAGE_SLOTS, MAIN_KV, PAGE_TOKENS, SWA_KV
from sglang_csa2.ops import Norm, ops_for

# The host's names for our records: 528-byte and 288-byte, data and scales interleaved token by token.
HOST_KV_LAYOUT = KVLayout.V41_NEW
HOST_COMPRESSED_LAYOUT = KVLayout.V41_FP4_NEW
HOST_COMPRESSED_OPTION = "fp4"


class PoolError(RuntimeError):
    """The pool the host built is not the one CSA2 reads and writes."""


class Csa2KVPool(DeepSeekV4TokenToKVPool):
    """The target model's pool in a csa2 run. Takes the host's constructor arguments unchanged."""

    def __init__(self, *args, **kwargs):
        if kwargs.get("is_draft_worker"):
            raise PoolError("a draft worker keeps the host's own pool; csa2's is for the target model")
        kwargs["kv_layout"], kwargs["compressed_kv_layout"] = HOST_KV_LAYOUT, HOST_COMPRESSED_OPTION
        super().__init__(*args, **kwargs)
        self._check_buffers()
        self._ops = ops_for(torch.device(self.device).type)

    def _make_indexer_pool(self, size: int, page_size: int, *args, **kwargs):
        # The host picks 64 or 128 slots by the libraries it finds; layout.py pins one for every machine.
        del page_size
        return super()._make_indexer_pool(size, INDEX_PAGE_SLOTS, *args, **kwargs)

    def _check_buffers(self) -> None:
        if self.page_size != PAGE_TOKENS:
            raise PoolError(f"page size is {self.page_size}, but csa2's records are paged by {PAGE_TOKENS} tokens")
        for ratio, pool in self.kv_pools.items():
            if pool.kv_layout is not HOST_COMPRESSED_LAYOUT:
                raise PoolError(f"the ratio-{ratio} pool has layout {pool.kv_layout}, not {HOST_COMPRESSED_LAYOUT}")
            if self.index_pools[ratio].index_k_with_scale_buffer[0].shape[1] != INDEX_PAGE_BYTES:
                raise PoolError(f"the ratio-{ratio} index-K pool is not paged by {INDEX_PAGE_SLOTS} slots")

    # Views -----------------------------------------------------------------

    def swa_cache(self, layer_id: int) -> Tensor:
        """A layer's own window cache, uint8 [slots, 528]."""
        return self.swa_kv_pool.kv_buffer[layer_id].view(-1, SWA_KV.bytes)

    def main_cache(self, layer_id: int) -> Tensor:
        """The main KV that a layer reads, uint8 [slots, 288]: its kv_source's."""
        item = self.layer_mapping[layer_id]
        return item.compress_kv_pool.kv_buffer[item.compress_layer_id].view(-1, MAIN_KV.bytes)

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
