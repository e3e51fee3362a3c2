"""What one forward's rows need, built once per forward and read by every layer.

A *row* is one query token. Decode, extend and mixed batches differ in how many rows a request has, so one
builder, `build_metadata`, serves them all: a decode is an extend of one row per request. Rows of one request are
contiguous and their positions consecutive. On a GPU a decode has a second form, `build_decode_metadata`: the same
content in fixed shapes, computed on the device, so that a CUDA graph can hold it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sglang_csa2.selection import Selection


@dataclass(frozen=True)
class PageTables:
    """The host's slot tables.

    req_to_token: int [request slots, context] full-pool slot of each position.
    full_to_swa: int64 [full slots] SWA slot of each full-pool slot.
    """

    req_to_token: Tensor
    full_to_swa: Tensor

    def full_slots(self, requests: Tensor, positions: Tensor) -> Tensor:
        """Full-pool slots, int64, of `positions` [...] of `requests` (broadcast against it)."""
        return self.req_to_token[requests, positions].long()

    def compressed_slots(self, requests: Tensor, entries: Tensor, ratio: int) -> Tensor:
        """Slots of compressed `entries`, -1 where an entry is negative: the first token's slot over the ratio."""
        first_token = entries.clamp(min=0) * ratio
        return (self.full_slots(requests, first_token) // ratio).masked_fill(entries < 0, -1)


@dataclass(frozen=True)
class RowGroup:
    """Requests with equally many rows: one rectangle, so the indexer loops over shapes and not over requests.

    rows: int64 [requests, rows per request] row ids.
    requests: int64 [requests] the host's request slots.
    lengths: int64 [requests] positions of each request, its last row's included.
    longest: their maximum, or a bound on it (a host number).
    starts: first row of each request (host numbers).
    """

    rows: Tensor
    requests: Tensor
    lengths: Tensor
    longest: int
    starts: tuple[int, ...]

    def tiles(self, *, height: int, width: int) -> Iterator[RowGroup]:
        """Sub-rectangles of at most `height` requests by `width` rows."""
        for top in range(0, self.rows.shape[0], height):
            members = slice(top, top + height)
            for left in range(0, self.rows.shape[1], width):
                rows = self.rows[members, left : left + width]
                starts = tuple(start + left for start in self.starts[members])
                yield RowGroup(rows, self.requests[members], self.lengths[members], self.longest, starts)


@dataclass(frozen=True)
class RatioRows:
    """What the rows mean for one compress ratio.

    visible: int64 [rows] entries each row sees.
    entry_rows: int64 [m] rows that complete an entry; entry_slots, entry_positions int64 [m] its slot and the
        position of its first token.
    partner_rows: int64 [m] (ratio 2) the even row of each pair, -1 where it waits in the pending ring;
        pending_reads int64 [m] its ring row.
    pending_rows, pending_writes: int64 [p] (ratio 2) rows whose partner comes in a later forward, and the ring
        rows that keep them.
    """

    visible: Tensor
    entry_rows: Tensor
    entry_slots: Tensor
    entry_positions: Tensor
    partner_rows: Tensor
    pending_reads: Tensor
    pending_rows: Tensor
    pending_writes: Tensor


@dataclass(frozen=True)
class DecodeRatioRows:
    """`RatioRows` of a decode, in fixed shapes for CUDA graphs: every row is asked whether it completes an entry.

    visible: int64 [rows], 0 for padding. positions: int64 [rows], -1 for padding.
    requests, out_slots: int64 [rows], -1 for padding. ring: ring rows per request slot.
    entry_slots, entry_positions: int64 [rows], for ratio 1, where every live row completes one; -1 and 0 for padding.
    """

    visible: Tensor
    positions: Tensor
    requests: Tensor
    out_slots: Tensor
    ring: int
    entry_slots: Tensor
    entry_positions: Tensor


@dataclass
class Csa2Metadata:
    """One forward's metadata. Everything is written by the builders, except `selection`, which the layers fill.

    requests: int64 [rows] request slot of each row. positions: int64 [rows].
    swa_out_slots: int64 [rows] where each row's window KV is written.
    swa_slots: int64 [rows, window] the SWA slots each row attends to, ascending in position, -1 padded.
    groups: the rectangles; None for a decode in fixed shapes. ratios: per compress ratio of the model.
    longest: positions of the batch's longest request, or a bound on it (a host number).
    request_slots: int64 [batch]. layout: where rows lie, from the host's numbers; None for a decode in fixed shapes.
    window_first: int64 [rows] position of each row's first window slot.
    prepared: what the route made of this forward's rows for several layers, by its own keys; the route writes it.
    """

    requests: Tensor
    positions: Tensor
    swa_out_slots: Tensor
    swa_slots: Tensor
    window_first: Tensor
    request_slots: Tensor
    layout: RowLayout | None
    groups: list[RowGroup] | None
    ratios: dict[int, RatioRows | DecodeRatioRows]
    longest: int
    tables: PageTables
    selection: Selection = field(default_factory=Selection)
    prepared: dict[int, Any] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return self.positions.shape[0]


def build_metadata(
    *,
    tables: PageTables,
    request_slots: Tensor,
    row_counts: Sequence[int],
    seq_lens: Sequence[int],
    out_slots: Tensor,
    window: int,
    ratios: Sequence[int],
    pending_ring: int,
    window_floor: Tensor | None = None,
) -> Csa2Metadata:
    """Build the metadata of a batch.

    Args:
        tables: the host's slot tables.
        request_slots: int64 [batch] rows of `req_to_token`.
        row_counts: rows of each request in this forward; 0 is allowed.
        seq_lens: positions of each request up to and including its last row.
        out_slots: int64 [rows] full-pool slots of the rows.
        window: SWA window in tokens, the row itself included.
        ratios: compress ratios of the model (1, 2).
        pending_ring: ring rows per request slot in the pending-pair buffer.
        window_floor: int64 [rows] absolute position below which a row's window does not reach, or None.

    Raises:
        ValueError: lengths disagree, or a request has more rows than positions.
    """
    _check(request_slots, row_counts, seq_lens, out_slots)
    layout = RowLayout.of(row_counts, seq_lens)
    device = out_slots.device
    positions = to_device(device, layout.positions)
    request_slots, out_slots = request_slots.long(), out_slots.long()
    requests = request_slots[to_device(device, layout.row_request)]
    first = window_first(positions, window, window_floor)
    return Csa2Metadata(
        requests=requests,
        positions=positions,
        swa_out_slots=tables.full_to_swa[out_slots].long(),
        swa_slots=window_slots(tables, requests, positions, window, first),
        window_first=first,
        request_slots=request_slots,
        layout=layout,
        groups=_groups(layout, row_counts, seq_lens, request_slots),
        ratios={ratio: _ratio_rows(ratio, layout, requests, positions, out_slots, pending_ring) for ratio in ratios},
        longest=max(seq_lens, default=0),
        tables=tables,
    )


def build_decode_metadata(
    *,
    tables: PageTables,
    request_slots: Tensor,
    seq_lens: Tensor,
    out_slots: Tensor,
    window: int,
    ratios: Sequence[int],
    pending_ring: int,
    longest: int,
) -> Csa2Metadata:
    """Metadata of one row per request, from device tensors alone: fixed shapes, nothing asked of the device.

    It may run inside a CUDA graph, which then recomputes it at every replay. A row whose output slot is 0, the
    host's dummy, is padding: it sees nothing and writes nothing, whatever its length and request say.

    Args:
        seq_lens: int [batch] positions of each request, the row's included.
        longest: a bound on them (the host's number in an eager decode, the context length in a graph).
        The others: see `build_metadata`.
    """
    live = out_slots > 0
    requests = request_slots.long().masked_fill(~live, 0)
    positions = (seq_lens.long() - 1).masked_fill(~live, -1)
    slots = out_slots.long()
    first = window_first(positions, window)
    return Csa2Metadata(
        requests=requests,
        positions=positions,
        swa_out_slots=tables.full_to_swa[slots].long().masked_fill(~live, -1),
        swa_slots=window_slots(tables, requests, positions, window, first),
        window_first=first,
        request_slots=requests,
        layout=None,
        groups=None,
        ratios={
            ratio: DecodeRatioRows(
                visible=(positions + 1) // ratio,
                positions=positions,
                requests=requests.masked_fill(~live, -1),
                out_slots=slots.masked_fill(~live, -1),
                ring=pending_ring,
                entry_slots=(slots // ratio).masked_fill(~live, -1),
                entry_positions=positions.clamp(min=0),
            )
            for ratio in ratios
        },
        longest=longest,
        tables=tables,
    )


@dataclass(frozen=True)
class RowLayout:
    """Where rows lie, from the host's numbers alone: CPU tensors, so that no question is asked of the device.

    counts, seq_lens: int64 [batch] rows and positions of each request; starts: int64 [batch] its first row.
    row_request: int64 [rows] index into the batch.
    positions: int64 [rows]. is_first, is_last: bool [rows] within the request's rows.
    """

    counts: Tensor
    seq_lens: Tensor
    starts: Tensor
    row_request: Tensor
    positions: Tensor
    is_first: Tensor
    is_last: Tensor

    @classmethod
    def of(cls, row_counts: Sequence[int], seq_lens: Sequence[int]) -> RowLayout:
        counts = torch.tensor(row_counts, dtype=torch.int64)
        lengths = torch.tensor(seq_lens, dtype=torch.int64)
        starts = counts.cumsum(0) - counts
        row_request = torch.repeat_interleave(torch.arange(len(row_counts)), counts)
        offset = torch.arange(row_request.shape[0]) - starts[row_request]
        return cls(
            counts=counts,
            seq_lens=lengths,
            starts=starts,
            row_request=row_request,
            positions=(lengths - counts)[row_request] + offset,
            is_first=offset == 0,
            is_last=offset == counts[row_request] - 1,
        )

    @property
    def first_positions(self) -> Tensor:
        """int64 [batch] position of each request's first row."""
        return self.seq_lens - self.counts


def to_device(device: torch.device, tensor: Tensor) -> Tensor:
    """A copy that does not wait: through pinned memory where there is a device to wait for."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def _check(request_slots: Tensor, row_counts: Sequence[int], seq_lens: Sequence[int], out_slots: Tensor) -> None:
    if not len(row_counts) == len(seq_lens) == request_slots.shape[0]:
        raise ValueError(
            f"one row count and one length per request: got {len(row_counts)} counts, {len(seq_lens)} lengths and "
            f"{request_slots.shape[0]} requests"
        )
    if sum(row_counts) != out_slots.shape[0]:
        raise ValueError(f"row counts add up to {sum(row_counts)}, but there are {out_slots.shape[0]} output slots")
    for rows, length in zip(row_counts, seq_lens, strict=True):
        if rows > length:
            raise ValueError(f"a request of length {length} cannot have {rows} rows")


def window_first(positions: Tensor, window: int, floor: Tensor | None = None) -> Tensor:
    """int64 [rows] first position that each row's window may reach; floor: int64 [rows] or None."""
    first = (positions - window + 1).clamp(min=0)
    return first if floor is None else torch.maximum(first, floor.long())


def window_slots(tables: PageTables, requests: Tensor, positions: Tensor, window: int, first: Tensor) -> Tensor:
    """SWA slots of each row's window: int64 [rows, window], ascending in position, -1 padded.

    requests, positions, first (`window_first`'s): int64 [rows]; a negative position has no window.
    """
    listed = first[:, None] + torch.arange(window, device=positions.device)
    absent = listed > positions[:, None]
    # A padding row's table entry may be stale, outside the mapping.
    full = tables.full_slots(requests[:, None], listed.masked_fill(absent, 0)).masked_fill(absent, 0)
    return tables.full_to_swa[full].long().masked_fill(absent, -1)


def _groups(
    layout: RowLayout, row_counts: Sequence[int], seq_lens: Sequence[int], request_slots: Tensor
) -> list[RowGroup]:
    members: dict[int, list[int]] = {}
    for request, rows in enumerate(row_counts):
        if rows:
            members.setdefault(rows, []).append(request)
    device = request_slots.device
    lengths = torch.tensor(seq_lens, dtype=torch.int64)
    groups = []
    for rows, batch in members.items():
        chosen = torch.tensor(batch)
        groups.append(
            RowGroup(
                rows=to_device(device, layout.starts[chosen][:, None] + torch.arange(rows)),
                requests=request_slots[to_device(device, chosen)],
                lengths=to_device(device, lengths[chosen]),
                longest=max(seq_lens[request] for request in batch),
                starts=tuple(layout.starts[chosen].tolist()),
            )
        )
    return groups


def _ratio_rows(
    ratio: int, layout: RowLayout, requests: Tensor, positions: Tensor, out_slots: Tensor, pending_ring: int
) -> RatioRows:
    closes = layout.positions % ratio == ratio - 1
    entries = closes.nonzero().flatten()
    partners = (entries - 1).masked_fill(layout.is_first[entries], -1)
    # Only a ratio-2 row can be left waiting, and only the last of its request.
    waiting = (~closes & layout.is_last).nonzero().flatten()
    device = positions.device
    entry_rows, partner_rows, pending_rows = (to_device(device, rows) for rows in (entries, partners, waiting))
    first_token = positions[entry_rows] - (ratio - 1)
    ring = requests * pending_ring
    return RatioRows(
        visible=(positions + 1) // ratio,
        entry_rows=entry_rows,
        entry_slots=out_slots[entry_rows] // ratio,
        entry_positions=first_token,
        partner_rows=partner_rows,
        pending_reads=ring[entry_rows] + first_token % pending_ring,
        pending_rows=pending_rows,
        pending_writes=ring[pending_rows] + positions[pending_rows] % pending_ring,
    )
