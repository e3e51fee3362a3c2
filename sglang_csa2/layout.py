"""Record formats and page bytes: the only owner of byte offsets.

A *record* is what one cache slot holds: quantized data followed by its scales.

| record    | dims | data                      | scales                 | bytes | spec |
|-----------|------|---------------------------|------------------------|-------|------|
| `SWA_KV`  | 512  | 512 e4m3                  | 16 ue8m0, one per 32   | 528   | 2.3  |
| `MAIN_KV` | 512  | 256 (two e2m1 per byte)   | 32 e4m3, one per 16    | 288   | 2.5  |
| `INDEX_K` | 128  | 64 (two e2m1 per byte)    | 4 ue8m0, one per 32    | 68    | 2.6  |

SWA KV and main KV are interleaved token by token (data, scales, data, scales, ...), so slot
`s` of a cache starts at byte `s * record.bytes` whatever the page. Index K is split per page of
`INDEX_PAGE_SLOTS` slots: first every slot's data, then every slot's scales, which is the order that
tensor-core scoring kernels load. In e2m1 data the even dimension is the low nibble.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_csa2.layer_plan import LayerPlan

# Tokens of one allocation page: the host's, for every DeepSeek-V4 family model.
PAGE_TOKENS = 256
# Slots of one index-K page. 64 divides a page at either ratio (256 and 128 slots).
INDEX_PAGE_SLOTS = 64
# fp32 kv and score of the even token that waits for its partner (ratio 2).
PENDING_PAIR_WIDTH = 2 * 512


@dataclass(frozen=True)
class Record:
    """One slot's bytes: `data_bytes` of values, then `scale_bytes`, one scale per `group` dims."""

    name: str
    dims: int
    data_bytes: int
    scale_bytes: int
    group: int

    @property
    def bytes(self) -> int:
        return self.data_bytes + self.scale_bytes


SWA_KV = Record("swa_kv", dims=512, data_bytes=512, scale_bytes=16, group=32)
MAIN_KV = Record("main_kv", dims=512, data_bytes=256, scale_bytes=32, group=16)
INDEX_K = Record("index_k", dims=128, data_bytes=64, scale_bytes=4, group=32)

INDEX_PAGE_BYTES = INDEX_PAGE_SLOTS * INDEX_K.bytes
INDEX_PAGE_SCALE_OFFSET = INDEX_PAGE_SLOTS * INDEX_K.data_bytes


def global_bytes_per_token(plan: LayerPlan) -> float:
    """Bytes of main KV and index K that one token of context costs (890 for V4.1-Flash, spec 2.12)."""
    return sum((MAIN_KV.bytes + INDEX_K.bytes) / source.ratio for source in plan.kv_sources)


def swa_bytes_per_slot(plan: LayerPlan) -> int:
    """Bytes that one SWA slot costs over all layers."""
    return SWA_KV.bytes * len(plan.layers)
