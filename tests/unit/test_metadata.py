"""A forward's metadata against loops over requests and positions, on random batches and tables."""

from __future__ import annotations

import random

import pytest
import torch

from sglang_csa2.metadata import PageTables, build_decode_metadata, build_metadata

WINDOW, RING, CONTEXT, SLOTS = 128, 2, 1024, 9
STALE = 1 << 30


def tables(seed: int) -> PageTables:
    """Pages handed out in random order; positions that no test reaches are stale."""
    rng = random.Random(seed)
    pages = rng.sample(range(1, 64), 2 * SLOTS)
    table = torch.full((SLOTS, CONTEXT), STALE, dtype=torch.int32)
    for slot in range(SLOTS):
        for page in range(2):
            start = pages[2 * slot + page] * 256
            table[slot, page * 256 : (page + 1) * 256] = torch.arange(start, start + 256)
    swa = torch.randperm(64 * 256, generator=torch.Generator().manual_seed(seed))
    return PageTables(table, swa)


def batch(seed: int) -> tuple[PageTables, list[int], list[int], list[int]]:
    """Tables, and per request its slot, its rows (some have none) and its length."""
    rng = random.Random(seed)
    slots = rng.sample(range(SLOTS), 5)
    lengths = [rng.choice([1, 2, 3, 8, 127, 128, 129, 130, 255, 256, 257, 400]) for _ in slots]
    counts = [rng.choice([0, 1, min(2, n), min(5, n), n]) for n in lengths]
    counts[0] = max(counts[0], 1)
    return tables(seed), slots, counts, lengths


def build(seed: int, **extra):
    page_tables, slots, counts, lengths = batch(seed)
    rows = [(s, p) for s, c, n in zip(slots, counts, lengths, strict=True) for p in range(n - c, n)]
    out = torch.tensor([int(page_tables.req_to_token[s, p]) for s, p in rows])
    meta = build_metadata(
        tables=page_tables, request_slots=torch.tensor(slots), row_counts=counts, seq_lens=lengths, out_slots=out,
        window=WINDOW, ratios=(1, 2), pending_ring=RING, **extra,
    )  # fmt: skip
    return meta, rows, out


def window_of(page_tables: PageTables, slot: int, position: int, floor: int = 0) -> list[int]:
    first = max(0, position - WINDOW + 1, floor)
    found = [int(page_tables.full_to_swa[page_tables.req_to_token[slot, p]]) for p in range(first, position + 1)]
    return found + [-1] * (WINDOW - len(found))


@pytest.mark.parametrize("seed", range(8))
def test_rows_windows_and_outputs(seed):
    meta, rows, out = build(seed)
    assert list(zip(meta.requests.tolist(), meta.positions.tolist(), strict=True)) == rows
    assert meta.swa_out_slots.tolist() == meta.tables.full_to_swa[out].tolist()
    for row, (slot, position) in enumerate(rows):
        assert meta.swa_slots[row].tolist() == window_of(meta.tables, slot, position)
    assert meta.longest == max(batch(seed)[3])


def test_a_window_floor_cuts_the_window():
    meta, rows, _ = build(3)
    floor = torch.tensor([max(0, p - row % 140) for row, (_, p) in enumerate(rows)])
    floored, _, _ = build(3, window_floor=floor)
    for row, (slot, position) in enumerate(rows):
        assert floored.swa_slots[row].tolist() == window_of(meta.tables, slot, position, int(floor[row]))


@pytest.mark.parametrize("seed", range(8))
def test_groups_are_the_requests_with_rows(seed):
    meta, rows, _ = build(seed)
    _, slots, counts, lengths = batch(seed)
    seen = {}
    for group in meta.groups:
        assert group.longest == int(group.lengths.max())
        for member, slot in enumerate(group.requests.tolist()):
            ids = group.rows[member].tolist()
            assert group.starts[member] == ids[0] and {rows[i][0] for i in ids} == {slot}
            seen[slot] = (len(ids), int(group.lengths[member]))
        for tile in group.tiles(height=1, width=2):
            assert tile.rows.shape[0] == 1 and tile.rows.shape[1] <= 2 and tile.starts[0] == int(tile.rows[0, 0])
    assert seen == {s: (c, n) for s, c, n in zip(slots, counts, lengths, strict=True) if c}


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_entries_pairs_and_pending_halves(seed, ratio):
    meta, rows, _ = build(seed)
    got = meta.ratios[ratio]
    row_of = {place: row for row, place in enumerate(rows)}
    assert got.visible.tolist() == [(position + 1) // ratio for _, position in rows]
    closing = [(row, s, p) for row, (s, p) in enumerate(rows) if (p + 1) % ratio == 0]
    assert got.entry_rows.tolist() == [row for row, _, _ in closing]
    assert got.entry_positions.tolist() == [p - (ratio - 1) for _, _, p in closing]
    first_slots = [int(meta.tables.req_to_token[s, p - (ratio - 1)]) for _, s, p in closing]
    assert got.entry_slots.tolist() == [slot // ratio for slot in first_slots]
    if ratio == 1:
        assert got.pending_rows.numel() == 0
        return
    for entry, (_, slot, position) in enumerate(closing):
        # The even half is a row of this forward, or waits under its request's slot and its own parity.
        assert got.partner_rows[entry] == row_of.get((slot, position - 1), -1)
        assert got.pending_reads[entry] == slot * RING + (position - 1) % RING
    waiting = [(row, s, p) for row, (s, p) in enumerate(rows) if p % 2 == 0 and (s, p + 1) not in row_of]
    assert got.pending_rows.tolist() == [row for row, _, _ in waiting]
    assert got.pending_writes.tolist() == [s * RING + p % RING for _, s, p in waiting]


@pytest.mark.parametrize("ratio", [1, 2])
def test_compressed_slots_are_first_tokens_over_the_ratio(ratio):
    page_tables = tables(1)
    entries = torch.tensor([[0, 1, -1, 127], [5, -1, 0, 100]])
    requests = torch.tensor([[3], [4]])
    found = page_tables.compressed_slots(requests, entries, ratio)
    for i, slot in enumerate((3, 4)):
        for j, entry in enumerate(entries[i].tolist()):
            wanted = int(page_tables.req_to_token[slot, entry * ratio]) // ratio if entry >= 0 else -1
            assert found[i, j] == wanted


def test_compressed_slots_do_not_wrap_near_the_int32_limit():
    table = torch.full((1, 4), (1 << 31) - 2, dtype=torch.int32)
    slots = PageTables(table, torch.zeros(1, dtype=torch.int64)).compressed_slots(
        torch.tensor([[0]]), torch.tensor([[1]]), 2
    )
    assert slots.dtype is torch.int64 and int(slots) * 288 > 1 << 31


@pytest.mark.parametrize("seed", range(4))
def test_a_decode_in_fixed_shapes_says_the_same(seed):
    page_tables, slots, _, lengths = batch(seed)
    out = torch.tensor([int(page_tables.req_to_token[s, n - 1]) for s, n in zip(slots, lengths, strict=True)])
    wanted = build_metadata(
        tables=page_tables, request_slots=torch.tensor(slots), row_counts=[1] * 5, seq_lens=lengths, out_slots=out,
        window=WINDOW, ratios=(1, 2), pending_ring=RING,
    )  # fmt: skip
    # Padding rows: output slot 0, whatever their length and request say.
    got = build_decode_metadata(
        tables=page_tables, request_slots=torch.tensor([*slots, 7, 1 << 20]), out_slots=torch.tensor([*out, 0, 0]),
        seq_lens=torch.tensor([*lengths, 1 << 40, 0]), window=WINDOW, ratios=(1, 2), pending_ring=RING, longest=CONTEXT,
    )  # fmt: skip
    for name in ("requests", "positions", "swa_out_slots", "swa_slots"):
        assert torch.equal(getattr(got, name)[:5], getattr(wanted, name)), name
    assert got.positions[5:].tolist() == got.swa_out_slots[5:].tolist() == [-1, -1]
    assert (got.swa_slots[5:] == -1).all()
    for ratio in (1, 2):
        rows = got.ratios[ratio]
        assert torch.equal(rows.visible[:5], wanted.ratios[ratio].visible)
        for name in ("requests", "out_slots", "entry_slots", "positions"):
            assert (getattr(rows, name)[5:] == -1).all(), name
        assert (rows.visible[5:] == 0).all()
        assert rows.entry_slots[:5].tolist() == [slot // ratio for slot in out.tolist()]
