"""The operations by device: one table of routes, chosen once at start.

| class       | devices | kernels                                        |
|-------------|---------|------------------------------------------------|
| `TorchOps`  | CPU     | kernels/*.py, the torch forms                  |
| `TritonOps` | CUDA    | kernels/triton_*.py, and attention by its name |

On a GPU, attention over packed records is one of three kernels, which `routes.choose` names at start. A prefill of many
rows goes through a bf16 workspace (workspace.py) and the library FlashMLA's kernel, where the library is installed and
has one for the card; otherwise packed records are read directly, as in a decode. A cache of three dims holds V4 records
(layout.py), and each operation takes the form for the cache it is given.

There is no fall-back between routes: a device or a choice that cannot be served is an error at start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sglang_csa2 import envs, routes
from sglang_csa2.kernels import flash_mla_decode, flash_mla_prefill, pool_pairs, store
from sglang_csa2.kernels.norm_rope import rms_norm
from sglang_csa2.kernels.records_v4 import pages_of
from sglang_csa2.kernels.sparse_attention import read_main_kv, read_swa_kv, sparse_attention
from sglang_csa2.layout import KV_LAYOUTS, PAGE_TOKENS, SWA_KV, V4
from sglang_csa2.metadata import Csa2Metadata, DecodeRatioRows, RatioRows


class Entries(NamedTuple):
    """Compressed entries just written: pre-RoPE latents bf16 [m, 512], their slots and positions, int64 [m].

    A slot of -1 is a row that completes no entry; its latent means nothing.
    """

    latent: Tensor
    slots: Tensor
    positions: Tensor


class Norm(NamedTuple):
    """An RMSNorm's weight [d] and epsilon."""

    weight: Tensor
    eps: float


class Ops(Protocol):
    """What a route provides; each method's contract is its kernel's.

    lists: what layers of one compress ratio share in `sparse_attention` in this forward, or None; topk: the width of
        their choice, 0 at ratio 0.
    sparse_prefill: attention over a workspace (`flash_mla_prefill`), or None where prefill reads packed records.
    index_multiple: what the columns of its index tables are rounded up to.
    in_place: the route (routes.py) of each operation that it does, read off the functions that it calls now.
    """

    name: str
    sparse_prefill: Callable[..., Tensor] | None
    index_multiple: int

    def swa_store(self, kv, norm: Norm, table, positions, slots, cache) -> None: ...
    def main_kv_store(self, kv, score, rows, pending, norm: Norm, table, cache) -> Entries: ...
    def index_k_store(self, key, norm: Norm, table, entries: Entries, cache) -> None: ...
    def lists(self, meta: Csa2Metadata, ratio: int, topk: int) -> Any: ...
    def sparse_attention(
        self, q, swa_cache, swa_slots, main_cache, main_slots, attn_sink, scale, lists=None
    ) -> Tensor: ...
    def gather_swa_kv(self, cache, slots, out) -> None: ...
    def gather_main_kv(self, cache, slots, out) -> None: ...
    def warm_up(self, device: torch.device) -> None: ...
    def in_place(self) -> dict[str, str]: ...


class TorchOps:
    name = "torch"
    sparse_prefill: Callable[..., Tensor] | None = None
    index_multiple = 1

    def swa_store(self, kv, norm, table, positions, slots, cache) -> None:
        put = store.swa_store_v4 if cache.ndim == 3 else store.swa_store
        put(kv, norm.weight, norm.eps, table, positions, slots, cache)

    def main_kv_store(self, kv, score, rows: RatioRows, pending, norm, table, cache) -> Entries:
        """Close entries (pooling pairs at ratio 2), normalise, rotate, quantize and store their main KV."""
        if score is None:
            pooled = kv[rows.entry_rows]
        else:
            pooled = pool_pairs.pool_pairs(kv, score, rows.entry_rows, rows.partner_rows, pending, rows.pending_reads)
            # After the read: a request may close one pair and leave the next waiting in the same ring row.
            pool_pairs.keep_pending(kv, score, rows.pending_rows, pending, rows.pending_writes)
        latent = rms_norm(pooled.bfloat16(), norm.weight, norm.eps)
        put = store.main_kv_store_v4 if cache.ndim == 3 else store.main_kv_store
        put(latent, table, rows.entry_positions, rows.entry_slots, cache)
        return Entries(latent, rows.entry_slots, rows.entry_positions)

    def index_k_store(self, key, norm, table, entries, cache) -> None:
        store.index_k_store(key, norm.weight, norm.eps, table, entries.positions, entries.slots, cache)

    def lists(self, meta, ratio: int, topk: int) -> None:
        """Every listed key is looked at."""

    def sparse_attention(self, q, swa_cache, swa_slots, main_cache, main_slots, attn_sink, scale, lists=None) -> Tensor:
        return sparse_attention(q, swa_cache, swa_slots, main_cache, main_slots, attn_sink, scale)

    def gather_swa_kv(self, cache, slots, out) -> None:
        out.copy_(read_swa_kv(cache, slots.clamp(min=0)).masked_fill(slots[:, None] < 0, 0))

    def gather_main_kv(self, cache, slots, out) -> None:
        out.copy_(read_main_kv(cache, slots.clamp(min=0)).masked_fill(slots[:, None] < 0, 0))

    def warm_up(self, device: torch.device) -> None:
        """Nothing is built at run time."""

    def in_place(self) -> dict[str, str]:
        attention = routes.route_of(sparse_attention)
        prefill = attention if self.sparse_prefill is None else routes.route_of(self.sparse_prefill)
        return {routes.DECODE: attention, routes.PREFILL: prefill, routes.STORES: routes.route_of(store)}


class TritonOps:
    name = "triton"
    index_multiple = flash_mla_prefill.INDEX_MULTIPLE

    def __init__(self, decode_attention: str, prefill_attention: str):
        # Here and not at the top: a machine without a GPU need not have Triton.
        from sglang_csa2.kernels import (
            triton_gather,
            triton_gather_v4,
            triton_pool_pairs,
            triton_sparse_attention,
            triton_store,
            triton_store_v4,
        )

        self._pairs, self._store, self._store_v4 = triton_pool_pairs, triton_store, triton_store_v4
        self._gather, self._gather_v4 = triton_gather, triton_gather_v4
        self.decode_attention = decode_attention
        if decode_attention == "cuda":
            from sglang_csa2.kernels import cuda_sparse_attention

            self._attention: Any = cuda_sparse_attention
        else:
            self._attention = {"triton": triton_sparse_attention, "flashmla": flash_mla_decode}[decode_attention]
        through_workspace = prefill_attention == "flash_mla_sparse_fwd"
        self.sparse_prefill = flash_mla_prefill.sparse_prefill if through_workspace else None

    def warm_up(self, device: torch.device) -> None:
        """Build what is built at run time and only some requests use: nvcc's kernel, and those of a large prefill."""
        if self.decode_attention == "cuda":
            self._attention.library()
        if self.sparse_prefill is None:
            return
        absent = torch.full((1,), -1, dtype=torch.int64, device=device)
        out = torch.empty(1, SWA_KV.dims, dtype=torch.bfloat16, device=device)
        layout = KV_LAYOUTS[envs.kv_layout()]
        for gather, record in ((self.gather_swa_kv, layout.swa), (self.gather_main_kv, layout.main)):
            if layout is V4:
                for slots in (PAGE_TOKENS, PAGE_TOKENS // 2):
                    page = torch.empty(1, layout.page_bytes(record, slots), dtype=torch.uint8, device=device)
                    gather(pages_of(page, slots), absent, out)
            else:
                gather(torch.empty(1, record.bytes, dtype=torch.uint8, device=device), absent, out)

    def in_place(self) -> dict[str, str]:
        prefill = "packed records" if self.sparse_prefill is None else routes.route_of(self.sparse_prefill)
        attention, stores = routes.route_of(self._attention), routes.route_of(self._store)
        return {routes.DECODE: attention, routes.PREFILL: prefill, routes.STORES: stores}

    def swa_store(self, kv, norm, table, positions, slots, cache) -> None:
        put = self._store_v4.swa_store_v4 if cache.ndim == 3 else self._store.swa_store
        put(kv, norm.weight, norm.eps, table, positions, slots, cache)

    def main_kv_store(self, kv, score, rows: RatioRows | DecodeRatioRows, pending, norm, table, cache) -> Entries:
        put = self._store_v4.main_kv_store_v4 if cache.ndim == 3 else self._store.main_kv_store
        if score is None:
            # Every row completes an entry at ratio 1, so rows are entries and nothing is gathered.
            latent = torch.empty(kv.shape, dtype=torch.bfloat16, device=kv.device)
            put(
                kv,
                table,
                rows.entry_positions,
                rows.entry_slots,
                cache,
                weight=norm.weight,
                eps=norm.eps,
                normed=latent,
            )
            return Entries(latent, rows.entry_slots, rows.entry_positions)
        if isinstance(rows, DecodeRatioRows):
            entries = Entries(
                *self._pairs.pool_decode(
                    kv, score, rows.positions, rows.requests, rows.out_slots, pending, rows.ring, norm.weight, norm.eps
                )
            )
        else:
            latent = self._pairs.pool_pairs(
                kv, score, rows.entry_rows, rows.partner_rows, pending, rows.pending_reads, norm.weight, norm.eps
            )
            self._pairs.keep_pending(kv, score, rows.pending_rows, pending, rows.pending_writes)
            entries = Entries(latent, rows.entry_slots, rows.entry_positions)
        put(entries.latent, table, entries.positions, entries.slots, cache)
        return entries

    def index_k_store(self, key, norm, table, entries, cache) -> None:
        self._store.index_k_store(key, norm.weight, norm.eps, table, entries.positions, entries.slots, cache)

    def gather_swa_kv(self, cache, slots, out) -> None:
        (self._gather_v4.gather_v4 if cache.ndim == 3 else self._gather.gather_swa_kv)(cache, slots, out)

    def gather_main_kv(self, cache, slots, out) -> None:
        (self._gather_v4.gather_v4 if cache.ndim == 3 else self._gather.gather_main_kv)(cache, slots, out)

    def lists(self, meta: Csa2Metadata, ratio: int, topk: int) -> flash_mla_decode.Lists | None:
        """FlashMLA's; the other kernels look at every listed key."""
        if self.decode_attention != "flashmla":
            return None
        if ratio not in meta.prepared:
            # Keys come first in their lists; what is past them need not be looked at.
            window = (meta.positions - meta.window_first + 1).clamp(min=1).int()
            chosen = meta.ratios[ratio].visible.clamp(min=1, max=topk).int() if ratio else None
            meta.prepared[ratio] = flash_mla_decode.Lists(window, chosen)
        return meta.prepared[ratio]

    def sparse_attention(self, q, swa_cache, swa_slots, main_cache, main_slots, attn_sink, scale, lists=None) -> Tensor:
        if self.decode_attention != "flashmla":
            return self._attention.sparse_attention(q, swa_cache, swa_slots, main_cache, main_slots, attn_sink, scale)
        caches = (_pages(swa_cache), swa_slots, None if main_cache is None else _pages(main_cache), main_slots)
        return self._attention.sparse_attention(q, *caches, attn_sink, scale, lists)


def _pages(cache: Tensor) -> Tensor:
    """Records one by one as pages of 128, which divides the pool's pages at either ratio; pages as they are."""
    return cache if cache.ndim == 3 else cache.unflatten(0, (-1, PAGE_TOKENS // 2))


def ops_for(device_type: str, decode_attention: str = "triton", prefill_attention: str = "packed records") -> Ops:
    """The operations of a device.

    decode_attention, prefill_attention: the routes that were chosen (routes.py); what only stores, as the pool does,
        needs neither.
    """
    return TorchOps() if device_type == "cpu" else TritonOps(decode_attention, prefill_attention)
