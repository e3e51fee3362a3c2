"""The operations by device: one table of routes, chosen once at start.

| route    | devices | kernels                                   | chosen when            |
|----------|---------|-------------------------------------------|------------------------|
| `torch`  | CPU     | kernels/*.py, the torch forms             | the model is on a CPU  |
| `triton` | CUDA    | kernels/triton_*.py                       | the model is on a GPU  |

The indexer chooses its kernels itself (indexer_cuda.py): CUDA C++ on Hopper, otherwise Triton.

Within the triton route a prefill of many rows goes through a bf16 workspace (workspace.py) and the library FlashMLA's
kernel, where the library is installed and has one for the card; otherwise packed records are read directly, as in a
decode. `prefill_route` says which, and why; the backend logs it.

There is no fall-back between routes: a device without a row here is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sglang_csa2.kernels import flash_mla_prefill, pool_pairs, store
from sglang_csa2.kernels.norm_rope import rms_norm
from sglang_csa2.kernels.records import decode_main_kv, decode_swa_kv
from sglang_csa2.kernels.sparse_attention import sparse_attention
from sglang_csa2.layout import MAIN_KV, SWA_KV
from sglang_csa2.metadata import DecodeRatioRows, RatioRows


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

    sparse_prefill: attention over a workspace (`flash_mla_prefill`), or None where prefill reads packed records.
    index_multiple: what the columns of its index tables are rounded up to.
    """

    name: str
    prefill_route: str
    sparse_prefill: Callable[..., Tensor] | None
    index_multiple: int

    def swa_store(self, kv, norm: Norm, table, positions, slots, cache) -> None: ...
    def main_kv_store(self, kv, score, rows, pending, norm: Norm, table, cache) -> Entries: ...
    def index_k_store(self, key, norm: Norm, table, entries: Entries, cache) -> None: ...
    def sparse_attention(self, q, swa_cache, swa_slots, main_cache, main_slots, attn_sink, scale) -> Tensor: ...
    def gather_swa_kv(self, cache, slots, out) -> None: ...
    def gather_main_kv(self, cache, slots, out) -> None: ...
    def warm_up(self, device: torch.device) -> None: ...


class TorchOps:
    name = "torch"
    prefill_route = "torch over packed records"
    sparse_prefill: Callable[..., Tensor] | None = None
    index_multiple = 1

    def swa_store(self, kv, norm, table, positions, slots, cache) -> None:
        store.swa_store(kv, norm.weight, norm.eps, table, positions, slots, cache)

    def main_kv_store(self, kv, score, rows: RatioRows, pending, norm, table, cache) -> Entries:
        """Close entries (pooling pairs at ratio 2), normalise, rotate, quantize and store their main KV."""
        if score is None:
            pooled = kv[rows.entry_rows]
        else:
            pooled = pool_pairs.pool_pairs(kv, score, rows.entry_rows, rows.partner_rows, pending, rows.pending_reads)
            # After the read: a request may close one pair and leave the next waiting in the same ring row.
            pool_pairs.keep_pending(kv, score, rows.pending_rows, pending, rows.pending_writes)
        latent = rms_norm(pooled.bfloat16(), norm.weight, norm.eps)
        store.main_kv_store(latent, table, rows.entry_positions, rows.entry_slots, cache)
        return Entries(latent, rows.entry_slots, rows.entry_positions)

    def index_k_store(self, key, norm, table, entries, cache) -> None:
        store.index_k_store(key, norm.weight, norm.eps, table, entries.positions, entries.slots, cache)

    def sparse_attention(self, q, swa_cache, swa_slots, main_cache, main_slots, attn_sink, scale) -> Tensor:
        return sparse_attention(q, swa_cache, swa_slots, main_cache, main_slots, attn_sink, scale)

    def gather_swa_kv(self, cache, slots, out) -> None:
        out.copy_(decode_swa_kv(cache[slots.clamp(min=0)]).masked_fill(slots[:, None] < 0, 0))

    def gather_main_kv(self, cache, slots, out) -> None:
        out.copy_(decode_main_kv(cache[slots.clamp(min=0)]).masked_fill(slots[:, None] < 0, 0))

    def warm_up(self, device: torch.device) -> None:
        """Nothing is built at run time."""


class TritonOps:
    name = "triton"
    index_multiple = flash_mla_prefill.INDEX_MULTIPLE

    def __init__(self):
        # Here and not at the top: a machine without a GPU need not have Triton.
        from sglang_csa2.kernels import triton_gather, triton_pool_pairs, triton_sparse_attention, triton_store
        from sglang_csa2.kernels.triton_records import compute_capability

        self._pairs, self._attention, self._store = triton_pool_pairs, triton_sparse_attention, triton_store
        self.gather_swa_kv, self.gather_main_kv = triton_gather.gather_swa_kv, triton_gather.gather_main_kv
        card = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        missing = flash_mla_prefill.missing(compute_capability(card))
        self.sparse_prefill = None if missing else flash_mla_prefill.sparse_prefill
        self.prefill_route = (
            f"triton over packed records ({missing})"
            if missing
            else f"flash_mla_sparse_fwd of sgl-flash-mla {flash_mla_prefill.version()} over a gathered bf16 workspace"
        )

    def warm_up(self, device: torch.device) -> None:
        """Build the kernels that only a large prefill uses."""
        if self.sparse_prefill is None:
            return
        absent = torch.full((1,), -1, dtype=torch.int64, device=device)
        out = torch.empty(1, SWA_KV.dims, dtype=torch.bfloat16, device=device)
        for gather, record in ((self.gather_swa_kv, SWA_KV), (self.gather_main_kv, MAIN_KV)):
            gather(torch.empty(1, record.bytes, dtype=torch.uint8, device=device), absent, out)

    def swa_store(self, kv, norm, table, positions, slots, cache) -> None:
        self._store.swa_store(kv, norm.weight, norm.eps, table, positions, slots, cache)

    def main_kv_store(self, kv, score, rows: RatioRows | DecodeRatioRows, pending, norm, table, cache) -> Entries:
        if score is None:
            # Every row completes an entry at ratio 1, so rows are entries and nothing is gathered.
            latent = torch.empty(kv.shape, dtype=torch.bfloat16, device=kv.device)
            self._store.main_kv_store(
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
        self._store.main_kv_store(entries.latent, table, entries.positions, entries.slots, cache)
        return entries

    def index_k_store(self, key, norm, table, entries, cache) -> None:
        self._store.index_k_store(key, norm.weight, norm.eps, table, entries.positions, entries.slots, cache)

    def sparse_attention(self, q, swa_cache, swa_slots, main_cache, main_slots, attn_sink, scale) -> Tensor:
        return self._attention.sparse_attention(q, swa_cache, swa_slots, main_cache, main_slots, attn_sink, scale)


_ROUTES: dict[str, type[Ops]] = {"cpu": TorchOps, "cuda": TritonOps}


def ops_for(device_type: str) -> Ops:
    """The route of a device.

    Raises:
        ValueError: no route serves it.
    """
    if device_type not in _ROUTES:
        raise ValueError(f"csa2 has no kernels for device {device_type!r}; it serves {', '.join(sorted(_ROUTES))}")
    return _ROUTES[device_type]()
