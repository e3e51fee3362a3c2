"""Pool invariants, checked in every forward when SGLANG_CSA2_CHECK=1; nothing of this runs otherwise.

- A slot that is read holds what was written there since it was allocated, by the request or the prefix that reads it.
- Only Full layers write compressed caches.
- A selection does not outlive its forward.
- A selection is ascending, unique, inside what its row sees and inside its pool; a pool holds its row's newest block.

How: each row's token gets a serial number, kept per full-pool slot with its position and the serial of the token
before it. A store stamps its record with the serial; a read compares the stamp with the serial that the reading
request expects at that position. A request expects its own rows' serials, and those of the prefix that it found in
the tables, whose pages must each be one unbroken chain. Graph replays run no Python: on a GPU disable them. Under
checks a prefill reads packed records and not a workspace, so that every read is asked about.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_csa2.layout import PAGE_TOKENS
from sglang_csa2.metadata import Csa2Metadata


class CheckError(AssertionError):
    """An invariant of the pool or of a selection does not hold."""


def install(backend: Any) -> None:
    """Put the checks around a backend's and its pool's operations."""
    ledger = Ledger(backend)
    ops = CheckedOps(backend.ops, ledger)
    backend.ops = backend.token_to_kv_pool._ops = ops
    backend.indexer = CheckedIndexer(backend.indexer, ledger)
    build, sources = backend.init_forward_metadata, backend.forward_low_ratio_sources

    def init_forward_metadata(forward_batch: Any) -> None:
        build(forward_batch)
        if backend.forward_metadata is not None:
            ledger.begin(backend.forward_metadata, forward_batch)

    def forward_low_ratio_sources(**kwargs: Any) -> None:
        before = ops.compressed_stores
        sources(**kwargs)
        spec = backend.plan[kwargs["layer"].layer_id]
        if ops.compressed_stores != before and not spec.writes_cache:
            raise CheckError(f"layer {spec.layer_id} is a {spec.role.value} layer and wrote a compressed cache")

    def init_forward_metadata_in_graph(forward_batch: Any) -> None:
        raise CheckError("SGLANG_CSA2_CHECK=1 cannot see into a CUDA graph; start with --disable-cuda-graph")

    backend.init_forward_metadata = init_forward_metadata
    backend.init_forward_metadata_in_graph = init_forward_metadata_in_graph
    backend.forward_low_ratio_sources = forward_low_ratio_sources


class Ledger:
    """Who wrote what: serials per full-pool slot, stamps per record, and what each request slot expects."""

    def __init__(self, backend: Any):
        self.backend, pool = backend, backend.token_to_kv_pool
        self.table = backend.req_to_token_pool.req_to_token
        slots, device = pool.full_to_swa_index_mapping.shape[0], self.table.device
        self.serial, self.before, self.position = (_zeros(slots, device) for _ in range(3))
        self.expected = torch.zeros(self.table.shape, dtype=torch.int64, device=device)
        self.seen = torch.zeros_like(self.table)
        self.lengths: dict[int, int] = {}
        self.owners: dict[int, Any] = {}
        self.next_serial = 1
        self.selection: Any = None
        self.stamps: dict[int, Tensor] = {}
        self.names: dict[int, str] = {}
        for layer in backend.plan.layers:
            self._know(pool.swa_cache(layer.layer_id), f"window KV of layer {layer.layer_id}")
            if layer.writes_cache:
                self._know(pool.main_cache(layer.layer_id), f"main KV of layer {layer.layer_id}")
                self._know(pool.index_cache(layer.layer_id), f"index K of layer {layer.layer_id}", per_row=64)
                if layer.ratio == 2:
                    self._know(pool.pending_pairs(layer.layer_id), f"pending pairs of layer {layer.layer_id}")

    def _know(self, cache: Tensor, name: str, per_row: int = 1) -> None:
        self.stamps[cache.data_ptr()] = _zeros(cache.shape[:-1].numel() * per_row, cache.device)
        self.names[cache.data_ptr()] = name

    def begin(self, meta: Csa2Metadata, batch: Any) -> None:
        """A forward starts: its rows' slots are allocated anew, new requests adopt the prefix that they found."""
        if meta.selection is self.selection:
            raise CheckError("the selection of an earlier forward is this forward's: it must be made anew")
        self.selection = meta.selection
        rids = getattr(batch, "rids", None) or [None] * len(batch.req_pool_indices)
        live = meta.positions >= 0
        requests, positions = meta.requests[live], meta.positions[live]
        for slot, rid in zip(batch.req_pool_indices.tolist(), rids, strict=True):
            own = positions[requests == slot]
            if len(own) == 0:
                continue
            first = int(own[0])
            found = self.table[slot, :first]
            # The host puts a cached page in the place of its copy that a request has just computed.
            if (
                self.lengths.get(slot) != first
                or self.owners.get(slot) != rid
                or not found.equal(self.seen[slot, :first])
            ):
                self._adopt(slot, first)
            self.seen[slot, : first + len(own)] = self.table[slot, : first + len(own)]
            self.lengths[slot], self.owners[slot] = first + len(own), rid
            full = self.table[slot, first : first + len(own)].long()
            serials = torch.arange(self.next_serial, self.next_serial + len(own), device=full.device)
            self.next_serial += len(own)
            self.serial[full], self.position[full] = serials, own
            self.expected[slot, first : first + len(own)] = serials
            if first:
                self.before[full[0]] = self.expected[slot, first - 1]
            self.before[full[1:]] = serials[:-1]

    def _adopt(self, slot: int, length: int) -> None:
        full = self.table[slot, :length].long()
        serials = self.serial[full]
        whole = (serials > 0) & (self.position[full] == torch.arange(length, device=full.device))
        # Pages are the host's to put together; inside one the tokens follow each other.
        borders = torch.arange(1, max(length, 1), device=full.device) % PAGE_TOKENS == 0
        whole[1:] &= borders | (self.before[full[1:]] == serials[:-1])
        if not whole.all():
            broken = int((~whole).nonzero()[0])
            raise CheckError(
                f"request slot {slot} starts on a cached prefix of {length} tokens whose position {broken} (slot "
                f"{int(full[broken])}) was never written or belongs to another sequence"
            )
        self.expected[slot, :length] = serials

    def rows(self, meta: Csa2Metadata, offset: int = 0) -> Tensor:
        """Serials that the rows' requests expect at the rows' positions, minus an offset."""
        return self.expected[meta.requests, (meta.positions - offset).clamp(min=0)]

    def stamp(self, cache: Tensor, slots: Tensor, serials: Tensor) -> None:
        live = slots >= 0
        self.stamps[cache.data_ptr()][slots[live].long()] = serials[live]

    def read(self, cache: Tensor, slots: Tensor, serials: Tensor) -> None:
        """Every slot that is not negative must bear its serial."""
        stamps = self.stamps[cache.data_ptr()]
        live = slots >= 0
        outside = live & (slots >= len(stamps))
        wrong = live & (outside | (stamps[slots.clamp(0, len(stamps) - 1).long()] != serials) | (serials == 0))
        if wrong.any():
            place = tuple(wrong.nonzero()[0].tolist())
            raise CheckError(
                f"{self.names[cache.data_ptr()]}: slot {int(slots[place])} is read, but was not written since it was "
                f"allocated by the request or prefix that reads it (row {place[0]} of the forward)"
            )


class CheckedOps:
    """A route with stamps on its stores and questions before its reads."""

    sparse_prefill = None

    def __init__(self, inner: Any, ledger: Ledger):
        self.inner, self.ledger, self.name, self.compressed_stores = inner, ledger, inner.name, 0

    @property
    def meta(self) -> Csa2Metadata:
        return self.ledger.backend.forward_metadata

    def swa_store(self, kv, norm, table, positions, slots, cache) -> None:
        self.inner.swa_store(kv, norm, table, positions, slots, cache)
        self.ledger.stamp(cache, slots, self.ledger.rows(self.meta)[: slots.shape[0]])

    def main_kv_store(self, kv, score, rows, pending, norm, table, cache):
        ledger, meta = self.ledger, self.meta
        self.compressed_stores += 1
        if pending is not None:
            self._pending(meta, pending, lambda ring, serials: ledger.read(pending, ring, serials), reads=True)
        entries = self.inner.main_kv_store(kv, score, rows, pending, norm, table, cache)
        if pending is not None:
            self._pending(meta, pending, lambda ring, serials: ledger.stamp(pending, ring, serials), reads=False)
        ledger.stamp(cache, entries.slots, self._entry_serials(rows, entries, meta))
        return entries

    def _pending(self, meta: Csa2Metadata, pending: Tensor, act, *, reads: bool) -> None:
        """Ring rows that this forward's odd first rows read, or its even last rows leave, and their serials."""
        ring = self.ledger.backend.token_to_kv_pool.pending_ring
        requests, positions = meta.requests, meta.positions
        border = torch.ones_like(positions, dtype=torch.bool)
        if reads:
            border[1:] = requests[1:] != requests[:-1]
        else:
            border[:-1] = requests[1:] != requests[:-1]
        chosen = border & (positions % 2 == int(reads)) & (positions >= 0)
        at = positions - int(reads)
        ring_rows = torch.where(chosen, requests * ring + at % ring, -1)
        act(ring_rows, self.ledger.rows(meta, int(reads)))

    def _entry_serials(self, rows, entries, meta: Csa2Metadata) -> Tensor:
        of = meta.requests if not hasattr(rows, "entry_rows") else meta.requests[rows.entry_rows]
        return self.ledger.expected[of, entries.positions.clamp(min=0)]

    def index_k_store(self, key, norm, table, entries, cache) -> None:
        self.inner.index_k_store(key, norm, table, entries, cache)
        rows = self.meta.ratios[self._ratio(cache)]
        self.ledger.stamp(cache, entries.slots, self._entry_serials(rows, entries, self.meta))

    def _ratio(self, cache: Tensor) -> int:
        backend = self.ledger.backend
        sources = [spec for spec in backend.plan.layers if spec.writes_cache]
        pool = backend.token_to_kv_pool
        return next(s.ratio for s in sources if pool.index_cache(s.layer_id).data_ptr() == cache.data_ptr())

    def lists(self, meta: Csa2Metadata, ratio: int, topk: int) -> Any:
        return self.inner.lists(meta, ratio, topk)

    def sparse_attention(self, q, swa_cache, swa_slots, main_cache, main_slots, attn_sink, scale, lists=None) -> Tensor:
        ledger, meta = self.ledger, self.meta
        count = (swa_slots >= 0).sum(-1, keepdim=True)
        offsets = torch.arange(swa_slots.shape[1], device=swa_slots.device)
        at = (meta.positions[:, None] - count + 1 + offsets).clamp(min=0)
        at = torch.minimum(at, meta.positions.clamp(min=0)[:, None])
        ledger.read(swa_cache, swa_slots, ledger.expected[meta.requests[:, None], at])
        if main_slots is not None:
            chosen = [(source, topk) for source, topk in meta.selection.topk.items() if topk.slots is main_slots]
            if not chosen:
                raise CheckError("a layer attends by a selection that was not published in this forward")
            source, topk = chosen[0]
            first = topk.positions.long().clamp(min=0) * ledger.backend.plan[source].ratio
            ledger.read(main_cache, main_slots, ledger.expected[meta.requests[:, None], first])
        return self.inner.sparse_attention(q, swa_cache, swa_slots, main_cache, main_slots, attn_sink, scale, lists)


class CheckedIndexer:
    """An indexer whose reads and choices are checked."""

    def __init__(self, inner: Any, ledger: Ledger):
        self.inner, self.ledger = inner, ledger

    def choose(self, layer, q, weights, cache, meta: Csa2Metadata) -> None:
        visible = meta.ratios[layer.ratio].visible
        self._scan(layer, cache, meta, visible)
        self.inner.choose(layer, q, weights, cache, meta)
        topk = meta.selection.topk[layer.layer_id]
        positions, what = topk.positions.long(), f"the selection of layer {layer.layer_id}"
        _ascending(positions, what)
        if (positions >= visible[:, None]).any():
            raise CheckError(f"{what} holds an entry that its row does not see")
        if not torch.equal(
            topk.slots.long(), meta.tables.compressed_slots(meta.requests[:, None], positions, layer.ratio)
        ):
            raise CheckError(f"{what} has slots that are not its entries'")
        size = self.inner.config.candidate_block_size
        if layer.is_candidate_source and (pool := meta.selection.pools[layer.layer_id]) is not None:
            _ascending(pool.long(), f"the candidate pool of layer {layer.layer_id}")
            newest = torch.where(visible > 0, (visible - 1) // size, -1)
            if (pool.amax(-1) != newest).any():
                raise CheckError(
                    f"the candidate pool of layer {layer.layer_id} does not end with its row's newest block"
                )
        pool = meta.selection.pools.get(layer.pool_source) if layer.pool_source is not None else None
        if pool is not None:
            blocks = positions // size
            # Ascending to the end, so that each row can be searched.
            sought = pool.long().masked_fill(pool < 0, 1 << 62)
            place = torch.searchsorted(sought, blocks.contiguous()).clamp(max=sought.shape[1] - 1)
            inside = sought.gather(1, place) == blocks
            if ((positions >= 0) & ~inside).any():
                raise CheckError(f"{what} leaves the candidate pool of layer {layer.pool_source}")

    def _scan(self, layer, cache: Tensor, meta: Csa2Metadata, visible: Tensor) -> None:
        """Every entry that a request's last row sees has its key."""
        last = torch.ones_like(meta.positions, dtype=torch.bool)
        last[:-1] = meta.requests[1:] != meta.requests[:-1]
        for request, count in zip(meta.requests[last].tolist(), visible[last].tolist(), strict=True):
            entries = torch.arange(count, device=cache.device)[None]
            slots = meta.tables.compressed_slots(torch.tensor([[request]], device=cache.device), entries, layer.ratio)
            self.ledger.read(cache, slots, self.ledger.expected[request, entries * layer.ratio])


def _zeros(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.int64, device=device)


def _ascending(choice: Tensor, what: str) -> None:
    """Rows ascend strictly and are padded with -1 at the end."""
    left, right = choice[:, :-1], choice[:, 1:]
    if not (((right > left) & (left >= 0)) | (right == -1)).all() or (choice < -1).any():
        raise CheckError(f"{what} is not ascending, unique and padded with -1 at its end")
