"""Who wrote what: the books behind `checks`.

Each row's token gets a serial number, kept per slot of the full and of the SWA pool with its position and the serial of
the token before it. A store stamps its record with the serial; a read compares the stamp with the serial that the
reading request expects at that position. A request expects its own rows' serials, and those of the prefix that it found
in the tables, whose pages must each be one unbroken chain. Of window KV it expects those apart: the host may point a
cached page, whose window KV it had given up, at the window KV that another request has computed for the same tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_csa2.layout import PAGE_TOKENS
from sglang_csa2.metadata import Csa2Metadata


class CheckError(AssertionError):
    """An invariant of the pool or of a selection does not hold."""


class Ledger:
    """Who wrote which slot, stamps per record, and what each request slot expects.

    full, swa: the tokens of the two pools' slots. expected, expected_window: int64 [request slots, context] serials by
        position, of compressed and of window KV; 0 where a request may not read.
    stamps: per cache, by its address, int64 [slots]; names: what people call it. caches: addresses by kind and layer.
    """

    def __init__(self, backend: Any):
        self.backend, pool = backend, backend.token_to_kv_pool
        self.table = backend.req_to_token_pool.req_to_token
        self.full_to_swa, self.window = pool.full_to_swa_index_mapping, backend.plan.config.sliding_window
        self.full = Tokens(self.full_to_swa.shape[0], self.table.device)
        self.swa = Tokens(pool.swa_cache(0).shape[:-1].numel(), self.table.device)
        self.expected, self.expected_window = (
            torch.zeros(self.table.shape, dtype=torch.int64, device=self.table.device) for _ in range(2)
        )
        self.seen = torch.zeros_like(self.table)
        self.lengths: dict[int, int] = {}
        self.owners: dict[int, Any] = {}
        self.next_serial = 1
        self.selection: Any = None
        self.stamps: dict[int, Tensor] = {}
        self.names: dict[int, str] = {}
        self.caches: dict[tuple[str, int], int] = {}
        for layer in backend.plan.layers:
            one = layer.layer_id
            self._know("window KV", one, pool.swa_cache(one))
            if layer.writes_cache:
                self._know("main KV", one, pool.main_cache(one))
                self._know("index K", one, pool.index_cache(one), per_row=pool.index_page_slots)
                if layer.ratio == 2:
                    self._know("pending pairs", one, pool.pending_pairs(one))

    def forget(self, requests: list[int]) -> None:
        """Request slots that the host has freed: who comes next adopts what it finds."""
        for slot in requests:
            self.lengths.pop(slot, None)

    def _know(self, kind: str, layer_id: int, cache: Tensor, per_row: int = 1) -> None:
        address = cache.data_ptr()
        self.stamps[address] = _zeros(cache.shape[:-1].numel() * per_row, cache.device)
        self.names[address] = f"{kind} of layer {layer_id}"
        self.caches[kind, layer_id] = address

    def same(self, cache: Tensor | None, kind: str, source: int, layer_id: int, does: str = "reads") -> Tensor:
        """The cache, which must be the one of this kind that `source` keeps."""
        if cache is None or cache.data_ptr() != self.caches[kind, source]:
            other = "nothing" if cache is None else self.names.get(cache.data_ptr(), "what is not the pool's")
            raise CheckError(f"layer {layer_id} {does} {other}, not {kind} of layer {source}")
        return cache

    def begin(self, meta: Csa2Metadata, batch: Any) -> None:
        """A forward starts: its rows' slots are allocated anew, new requests adopt the prefix that they found."""
        if meta.selection is self.selection:
            raise CheckError("the selection of an earlier forward is this forward's: it must be made anew")
        self.selection = meta.selection
        live = self._check_rows(meta, batch)
        rids = getattr(batch, "rids", None) or [None] * len(batch.req_pool_indices)
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
            before = self.expected[slot, first - 1 : first] if first else serials.new_zeros(1)
            window_before = self.expected_window[slot, first - 1 : first] if first else before
            self.full.put(full, serials, own, before)
            self.swa.put(self.full_to_swa[full].long(), serials, own, window_before)
            for expected in (self.expected, self.expected_window):
                expected[slot, first : first + len(own)] = serials

    def _check_rows(self, meta: Csa2Metadata, batch: Any) -> Tensor:
        """The rows are the batch's, by the host's own numbers; bool [rows] those that are not padding."""
        lengths = batch.seq_lens_cpu.tolist()
        counts = [1] * len(lengths) if batch.forward_mode.is_decode() else list(batch.extend_seq_lens_cpu)
        slots = batch.out_cache_loc.long()
        live = slots > 0
        device = meta.positions.device
        positions = torch.cat([torch.arange(n - count, n) for n, count in zip(lengths, counts, strict=True)])
        requests = batch.req_pool_indices.long().repeat_interleave(torch.tensor(counts, device=device))
        _equal(meta.positions[live], positions.to(device)[live], "positions", "the host's")
        _equal(meta.requests[live], requests[live], "requests", "the host's")
        _equal(self.table[meta.requests, meta.positions.clamp(min=0)].long()[live], slots[live], "slots", "the table's")
        _equal(meta.positions[~live], meta.positions[~live].clamp(max=-1), "positions of padding", "negative")
        _equal(meta.window_first, self._window_first(meta.positions), "first window positions", "a window before")
        for ratio, rows in meta.ratios.items():
            visible = (meta.positions + 1) // ratio
            _equal(rows.visible, visible, f"visible entries at ratio {ratio}", "the complete ones")
        return live

    def begin_tail(self, whole: Csa2Metadata, tail: Csa2Metadata, rows: Tensor) -> None:
        """Bounded replay's rows are the last ones of the forward, each with what it sees; they choose anew."""
        if tail.selection is whole.selection:
            raise CheckError("the selection of the whole forward is its tail's: it must be made anew")
        _equal(tail.positions, whole.positions[rows], "positions of the replayed tail", "the forward's")
        _equal(tail.requests, whole.requests[rows], "requests of the replayed tail", "the forward's")
        # A request's floor, where it has one, is a window before its end: none of its rows sees further back.
        plain = self._window_first(tail.positions)
        last = torch.zeros(len(self.expected), dtype=torch.int64, device=tail.positions.device)
        last.scatter_reduce_(0, tail.requests, tail.positions, "amax")
        floored = torch.maximum(plain, self._window_first(last[tail.requests]))
        wanted = torch.where(tail.window_first == plain, plain, floored)
        _equal(
            tail.window_first, wanted, "first window positions of the replayed tail", "a window before it or its end"
        )
        for ratio, kept in tail.ratios.items():
            seen = whole.ratios[ratio].visible[rows]
            _equal(kept.visible, seen, f"visible entries of the replayed tail at ratio {ratio}", "the forward's")

    def _window_first(self, positions: Tensor) -> Tensor:
        return (positions - self.window + 1).clamp(min=0)

    def _adopt(self, slot: int, length: int) -> None:
        full = self.table[slot, :length].long()
        positions = torch.arange(length, device=full.device)
        self.expected[slot, :length] = self.full.chain(full, positions, slot, length)
        # A row sees a window before it, itself included; what lies further back may be gone.
        seen = max(0, length - self.window + 1)
        self.expected_window[slot, :length] = 0
        swa = self.full_to_swa[full[seen:]].long()
        self.expected_window[slot, seen:length] = self.swa.chain(swa, positions[seen:], slot, length)

    def rows(self, meta: Csa2Metadata) -> Tensor:
        """Serials that the rows' requests expect at the rows' positions."""
        return self.expected[meta.requests, meta.positions.clamp(min=0)]

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


class Tokens:
    """The token that a pool's slots hold.

    serial, position, before: int64 [slots], 0 where none was written; `before` is the serial of the token before it.
    """

    def __init__(self, slots: int, device: torch.device):
        self.serial, self.position, self.before = (_zeros(slots, device) for _ in range(3))

    def put(self, slots: Tensor, serials: Tensor, positions: Tensor, before: Tensor) -> None:
        """A request's consecutive tokens; before: int64 [1] the serial of the one before the first."""
        self.serial[slots], self.position[slots] = serials, positions
        self.before[slots] = torch.cat([before, serials[:-1]])

    def chain(self, slots: Tensor, positions: Tensor, request: int, length: int) -> Tensor:
        """Serials of a prefix's slots, which must hold these consecutive positions, each page of one sequence.

        Raises:
            CheckError: a slot was never written, or its page is of several sequences.
        """
        serials = self.serial[slots]
        whole = (serials > 0) & (self.position[slots] == positions)
        # Pages are the host's to put together; inside one the tokens follow each other.
        borders = positions[1:] % PAGE_TOKENS == 0
        whole[1:] &= borders | (self.before[slots[1:]] == serials[:-1])
        if not whole.all():
            broken = int((~whole).nonzero()[0])
            raise CheckError(
                f"request slot {request} starts on a cached prefix of {length} tokens whose position "
                f"{int(positions[broken])} (slot {int(slots[broken])}) was never written or belongs to another sequence"
            )
        return serials


def _zeros(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.int64, device=device)


def _equal(mine: Tensor, wanted: Tensor, what: str, whose: str) -> None:
    if mine.shape != wanted.shape:
        raise CheckError(f"there are {len(mine)} {what}, not {len(wanted)}")
    if (wrong := mine != wanted).any():
        row = int(wrong.flatten().nonzero()[0])
        raise CheckError(
            f"the {what} are not {whose}: place {row} is {int(mine.flatten()[row])}, not {int(wanted.flatten()[row])}"
        )
