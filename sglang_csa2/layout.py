"""Record formats and page bytes: the only owner of byte offsets.

A *record* is what one cache slot holds: quantized data followed by its scales.

| record    | dims | data                      | scales                 | bytes | spec |
|-----------|------|---------------------------|------------------------|-------|------|
| `SWA_KV`  | 512  | 512 e4m3                  | 16 ue8m0, one per 32   | 528   | 2.3  |
| `MAIN_KV` | 512  | 256 (two e2m1 per byte)   | 32 e4m3, one per 16    | 288   | 2.5  |
| `INDEX_K` | 128  | 64 (two e2m1 per byte)    | 4 ue8m0, one per 32    | 68    | 2.6  |
| `V4_KV`   | 512  | 448 e4m3, 64 bf16 (roped) | 7 ue8m0, one per 64, 1 | 584   | 2b   |

A *KV layout* says which records hold window KV and main KV:

- `v41`, the default: `SWA_KV` and `MAIN_KV`, interleaved token by token (data, scales, data, scales, ...), so slot
  `s` of a cache starts at byte `s * record.bytes` whatever the page. A cache is uint8 [slots, record.bytes].
- `v4`: `V4_KV` for both, for the kernels of Hopper's libraries. Per page of 256 tokens first every slot's data, then
  every slot's scales (the last byte of the eight is not read), then padding to a multiple of 576 bytes. A cache is
  uint8 [pages, slots of a page, 584], its pages `stride(0)` bytes apart: the shape that those kernels take, whose last
  two dims cover a page's bytes and are not records.

Index K is the same in both, split per page of `INDEX_PAGE_SLOTS` slots in the same way, which is the order that
tensor-core scoring kernels load. In e2m1 data the even dimension is the low nibble.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_csa2.layer_plan import LayerPlan

# Tokens of one allocation page: the host's, for every DeepSeek-V4 family model.
PAGE_TOKENS = 256
# Slots of one index-K page. 64 divides a page at either ratio (256 and 128 slots).
INDEX_PAGE_SLOTS = 64
# DeepGEMM's sparse scores take pages a multiple of 512 bytes apart, which 64 slots are not.
DEEP_GEMM_INDEX_PAGE_SLOTS = 128
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
V4_KV = Record("v4_kv", dims=512, data_bytes=576, scale_bytes=8, group=64)
# Dims of a V4 record that are e4m3; the others, which are rotated, are bf16.
V4_FP8_DIMS = 448


@dataclass(frozen=True)
class KVLayout:
    """Which records window KV and main KV are kept in, and what a page of them is padded to a multiple of."""

    name: str
    swa: Record
    main: Record
    page_align: int

    def page_bytes(self, record: Record, slots: int) -> int:
        return -(-slots * record.bytes // self.page_align) * self.page_align

    def main_bytes(self, ratio: int) -> float:
        """Bytes per main KV entry, its share of the padding included."""
        slots = PAGE_TOKENS // ratio
        return self.page_bytes(self.main, slots) / slots

    @property
    def swa_bytes(self) -> float:
        """Bytes per window slot, its share of the padding included."""
        return self.page_bytes(self.swa, PAGE_TOKENS) / PAGE_TOKENS


V41 = KVLayout("v41", SWA_KV, MAIN_KV, page_align=1)
V4 = KVLayout("v4", V4_KV, V4_KV, page_align=V4_KV.data_bytes)
KV_LAYOUTS = {layout.name: layout for layout in (V41, V4)}

INDEX_PAGE_BYTES = INDEX_PAGE_SLOTS * INDEX_K.bytes
INDEX_PAGE_SCALE_OFFSET = INDEX_PAGE_SLOTS * INDEX_K.data_bytes


def global_bytes_per_token(plan: LayerPlan, layout: KVLayout = V41) -> float:
    """Bytes of main KV and index K that one token of context costs (890 for V4.1-Flash, spec 2.12; 1,632.5 in v4)."""
    return sum((layout.main_bytes(source.ratio) + INDEX_K.bytes) / source.ratio for source in plan.kv_sources)


def swa_bytes_per_slot(plan: LayerPlan, layout: KVLayout = V41) -> float:
    """Bytes that one SWA slot costs over all layers."""
    return layout.swa_bytes * len(plan.layers)
