"""The memory of a server: what a token, a window slot and a request cost, and how many tokens fit.

The records are `layout`'s; the way the host divides a KV budget (version 0.5.23, csa2's pool or its own) is restated
here in pure arithmetic, so that a plan needs neither a GPU nor SGLang. `tests/host/test_plan.py` holds every
figure against a running server and its pool.

The host reserves, in this order: the window slots, as many as its requests and cached prefixes can hold; the
pending pairs; then whole pages of compressed entries and index keys out of the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_csa2.layer_plan import LayerPlan, LayerSpec, Role
from sglang_csa2.layout import INDEX_K, INDEX_PAGE_SLOTS, PAGE_TOKENS, PENDING_PAIR_WIDTH, V4, V41, KVLayout

GIB = 1 << 30
# Ring rows per request of the pending pairs without speculation: the open pair's two tokens.
PENDING_RING = 2
# The host evicts window slots in steps (SGLANG_SWA_EVICTION_INTERVAL) and keeps two prefill chunks in flight.
EVICTION_INTERVAL, CHUNKS_IN_FLIGHT, TAILS_PER_REQUEST = 128, 2, 4


@dataclass(frozen=True)
class CacheLayout:
    """One way to store the caches, by the name that the table gives it."""

    name: str
    records: KVLayout

    def main_per_entry(self, ratio: int) -> float:
        return self.records.main_bytes(ratio)

    @property
    def swa_per_slot(self) -> float:
        return self.records.swa_bytes


CSA2 = CacheLayout("csa2", V41)
CSA2_V4 = CacheLayout("csa2, v4 records", V4)
# The host's own on Hopper: both caches in one 584-byte record, as csa2's v4.
STOCK = CacheLayout("stock dsv4 (584-byte records)", V4)


@dataclass(frozen=True)
class Serving:
    """The settings that the pools depend on. Names are the server's options."""

    max_running_requests: int
    context_length: int
    chunked_prefill_size: int = 8192
    radix_cache: bool = True
    swa_prefix_tails: int | None = None

    @property
    def prefix_tails(self) -> int:
        if self.swa_prefix_tails is not None:
            return self.swa_prefix_tails
        return TAILS_PER_REQUEST * self.max_running_requests if self.radix_cache else 0


@dataclass(frozen=True)
class RoleCost:
    """Bytes that the layers of one role and ratio keep: per token of context, window slot, request and query row."""

    role: str
    ratio: int
    layers: tuple[int, ...]
    main_kv_per_token: float
    index_k_per_token: float
    swa_per_slot: float
    pending_per_request: int
    selection_per_row: int


@dataclass(frozen=True)
class Budget:
    """One layout under one setting."""

    plan: LayerPlan
    layout: CacheLayout
    serving: Serving

    # What things cost -----------------------------------------------------------

    @property
    def main_kv_per_token(self) -> float:
        return sum(self.layout.main_per_entry(source.ratio) / source.ratio for source in self.plan.kv_sources)

    @property
    def index_k_per_token(self) -> float:
        return sum(INDEX_K.bytes / source.ratio for source in self.plan.kv_sources)

    @property
    def global_per_token(self) -> float:
        """The server's `bytes_per_full_token`."""
        return self.main_kv_per_token + self.index_k_per_token

    @property
    def swa_per_slot(self) -> float:
        return self.layout.swa_per_slot * len(self.plan.layers)

    @property
    def pair_sources(self) -> int:
        return sum(source.ratio == 2 for source in self.plan.kv_sources)

    @property
    def swa_slots_per_request(self) -> int:
        """Window slots a running request can hold: its window, a step of eviction, a page of padding, the next page."""
        return self.plan.config.sliding_window + EVICTION_INTERVAL + 2 * PAGE_TOKENS

    @property
    def pending_per_request(self) -> int:
        return PENDING_RING * PENDING_PAIR_WIDTH * 4 * self.pair_sources

    def global_per_request(self, tokens: int) -> float:
        """Main KV and index K of one request of `tokens`, in whole pages."""
        return self.global_per_token * _pages(tokens) * PAGE_TOKENS

    @property
    def selection_per_row(self) -> int:
        """Bytes published per query row of a forward: positions and slots (int64) of every choice, pool blocks."""
        return sum(cost.selection_per_row for cost in self.roles())

    @property
    def maxima_per_row(self) -> int:
        """fp32 maxima of blocks of 8 and tiles of 64 that a full scan keeps on a GPU; one layer's at a time."""
        entries = max((self.serving.context_length // s.ratio for s in self.plan.layers if s.chooses), default=0)
        return 4 * (entries // 8 + entries // 64)

    # What is reserved -------------------------------------------------------------

    @property
    def swa_slots(self) -> int:
        """The server's `swa_tokens`: running requests, prefills in flight and cached prefixes' windows."""
        serving, window = self.serving, self.plan.config.sliding_window
        slots = (
            serving.max_running_requests * self.swa_slots_per_request
            + CHUNKS_IN_FLIGHT * serving.chunked_prefill_size
            + PAGE_TOKENS
            + serving.prefix_tails * (window + PAGE_TOKENS)
        )
        return _pages(slots) * PAGE_TOKENS

    @property
    def swa_bytes(self) -> float:
        return self.swa_slots * self.swa_per_slot

    @property
    def pending_bytes(self) -> int:
        """Rings of every request slot, one slot spare, one ring and a row more; rows in pairs."""
        rows = (self.serving.max_running_requests + 1) * PENDING_RING + PENDING_RING + 1
        return -(-rows // 2) * 2 * PENDING_PAIR_WIDTH * 4 * self.pair_sources

    def padding_bytes(self, tokens: int) -> float:
        """Reserved beyond the tokens: a page of entries per cache, and the index pages' own rounding."""
        total = 0.0
        for source in self.plan.kv_sources:
            index_slots = self._index_pages(tokens, source.ratio) * INDEX_PAGE_SLOTS
            total += PAGE_TOKENS * self.layout.main_per_entry(source.ratio)
            total += (index_slots - tokens // source.ratio) * INDEX_K.bytes
        return total

    @staticmethod
    def _index_pages(tokens: int, ratio: int) -> int:
        return -(-((tokens + PAGE_TOKENS) // ratio + INDEX_PAGE_SLOTS) // INDEX_PAGE_SLOTS)

    def tokens(self, kv_bytes: float) -> int:
        """The server's `max_total_num_tokens` out of `kv_bytes`; 0 when the reserves leave nothing."""
        left = max(kv_bytes - self.swa_bytes - self.pending_bytes, 0)
        tokens = int(left / self.global_per_token) // PAGE_TOKENS * PAGE_TOKENS
        while tokens > 0 and tokens * self.global_per_token + self.padding_bytes(tokens) > left:
            tokens -= PAGE_TOKENS
        return tokens

    def buffers(self, tokens: int) -> dict[str, int]:
        """Bytes of the pool's buffers at `tokens` of context: what `Csa2KVPool.layer_bytes` counts."""
        sources = self.plan.kv_sources
        main = sum((tokens // s.ratio + PAGE_TOKENS) * self.layout.main_per_entry(s.ratio) for s in sources)
        index = sum(self._index_pages(tokens, s.ratio) * INDEX_PAGE_SLOTS * INDEX_K.bytes for s in sources)
        return {
            "swa_kv": round((self.swa_slots + PAGE_TOKENS) * self.swa_per_slot),
            "main_kv": round(main),
            "index_k": index,
            "pending_pairs": self.pending_bytes,
        }

    def roles(self) -> list[RoleCost]:
        """What the layers of each role and ratio keep, in the order of the model."""
        groups: dict[tuple[Role, int], list[LayerSpec]] = {}
        for layer in self.plan.layers:
            groups.setdefault((layer.role, layer.ratio), []).append(layer)
        return [self._role(role, ratio, layers) for (role, ratio), layers in groups.items()]

    def _role(self, role: Role, ratio: int, layers: list[LayerSpec]) -> RoleCost:
        keepers = sum(layer.writes_cache for layer in layers)
        pairs = keepers if ratio == 2 else 0
        return RoleCost(
            role=role.value,
            ratio=ratio,
            layers=tuple(layer.layer_id for layer in layers),
            main_kv_per_token=keepers * self.layout.main_per_entry(ratio) / ratio if keepers else 0.0,
            index_k_per_token=keepers * INDEX_K.bytes / ratio if keepers else 0.0,
            swa_per_slot=self.layout.swa_per_slot * len(layers),
            pending_per_request=PENDING_RING * PENDING_PAIR_WIDTH * 4 * pairs,
            selection_per_row=16 * self.plan.config.index_topk * sum(layer.chooses for layer in layers)
            + 8 * self.plan.config.candidate_topk_blocks * sum(layer.is_candidate_source for layer in layers),
        )


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS)
