"""Top-K by score, the best blocks by maximum, and slots of positions, on CUDA (spec 2.6, 2.7).

    best_blocks(block_max fp32 [n, blocks], tile_max fp32 [n, blocks / 8], visible int [n], k, keep_newest)
        -> int32 [n, k] block ids; the maxima are those of `block_maxima`
    select_in_blocks(scores fp32 [n, b * 8], block_max fp32 [n, b], blocks int32 [n, b], visible int [n], k)
        -> int32 [n, k] positions; scores and maxima as `index_scores_candidates` gives them
    compressed_slots(positions int [n, k], req_to_token, requests int [n], ratio) -> int64 [n, k]
    select_slots(select_in_blocks' and compressed_slots' arguments) -> both their results

Results are ascending, unique, below `visible`, padded with -1 at the end. Ties go to the lower position and
zeros of either sign are equal, so a row's choice depends on that row alone. A NaN score is never chosen, -inf
may be. `keep_newest` makes the block of the newest entry one of the k. Scores and maxima past the visible
entries are not read; a row whose blocks (or entries) all fit is given them without a look at its scores.

A row's k best entries lie in its k best blocks, ranked by (maximum, lower block first): a block outside them has k
blocks ahead of it, each with an entry that wins against all of its own. The same holds for blocks in tiles of 8. So a
row narrows level by level, 1M entries -> 16,384 maxima of 64 -> k tiles' maxima of 8 -> k blocks' entries, each level
small enough for registers.

One program per row: its keys (fp32 in an order-preserving integer form) stay in registers; the k-th largest is
found two bits at a time by counting, until exactly k are separated; a prefix sum gives each kept entry its place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_csa2.kernels.triton_records import INT_TYPES, check_rows

# What one program keeps in registers: 16 keys for each of 1024 threads.
MAX_KEYS = 16384
BLOCK_ENTRIES = 8
TILE_BLOCKS = 8


@triton.jit
def _ordered(scores, allowed):
    """fp32 -> int32 that orders alike; the least integer where not allowed or NaN, which no score maps to."""
    # Adding zero makes -0 and +0 the same key.
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(allowed & (scores == scores), key, -2147483648)


@triton.jit
def _add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _at_least(keys, threshold):
    """Whether each key reaches an unsigned threshold, int32; flipping the top bit compares it signed."""
    return (keys >= (threshold ^ 0x80000000).to(tl.int32, bitcast=True)).to(tl.int32)


@triton.jit
def _places(keys, k):
    """keys int32 [N] -> place of each kept key in the result, int32 [N], -1 where not kept; and their number."""
    # The threshold is built from the top bit down, until it separates exactly k keys or has no bits left.
    threshold = tl.full((), 0, tl.uint32)
    unit = tl.full((), 1 << 30, tl.uint32)
    reached = k + 1
    while (unit > 0) & (reached != k):
        # Counts are at most 16384: two share an integer.
        low, at_three = tl.reduce(
            (
                _at_least(keys, threshold + unit) + (_at_least(keys, threshold + 2 * unit) << 16),
                _at_least(keys, threshold + 3 * unit),
            ),
            0,
            _add2,
        )
        at_one, at_two = low & 0xFFFF, low >> 16
        digit = (at_one >= k).to(tl.uint32) + (at_two >= k).to(tl.uint32) + (at_three >= k).to(tl.uint32)
        threshold += digit * unit
        reached = tl.where(digit == 3, at_three, tl.where(digit == 2, at_two, tl.where(digit == 1, at_one, reached)))
        unit = unit >> 2
    limit = (threshold ^ 0x80000000).to(tl.int32, bitcast=True)
    above = keys > limit
    tied = (keys == limit) & (keys != -2147483648)
    both = above.to(tl.int32) + (tied.to(tl.int32) << 16)
    totals = tl.sum(both, axis=0)
    room = k - (totals & 0xFFFF)
    counts = tl.cumsum(both, axis=0)
    tied_before = counts >> 16
    kept = above | (tied & (tied_before <= room))
    place = (counts & 0xFFFF) + tl.minimum(tied_before, room) - 1
    return tl.where(kept, place, -1), (totals & 0xFFFF) + tl.minimum(totals >> 16, room)


@triton.jit
def _emit(chosen_ptr, values, places, number, k, K_PAD: tl.constexpr):
    """Write values [N] at their places and -1 from `number` to `k`."""
    tl.store(chosen_ptr + places, values, mask=places >= 0)
    column = tl.arange(0, K_PAD)
    tl.store(chosen_ptr + column, tl.full((K_PAD,), -1, tl.int32), mask=(column >= number) & (column < k))


@triton.jit
def _choose_all(scores_ptr, width, forced, chosen_ptr, k, N: tl.constexpr, K_PAD: tl.constexpr):
    """The k best of a row's first `width` scores; `forced` counts as the greatest."""
    column = tl.arange(0, N)
    here = column < width
    scores = tl.load(scores_ptr + column, mask=here, other=0.0)
    keys = _ordered(tl.where(column == forced, float("inf"), scores), here)
    # A forced block may rank among infinite maxima: it must not lose the tie.
    keys = tl.where(here & (column == forced), 2147483647, keys)
    places, number = _places(keys, k)
    _emit(chosen_ptr, column, places, number, k, K_PAD)


@triton.jit
def _choose_children(
    parents_ptr, parents, scores_ptr, width, forced, chosen_ptr, k, N: tl.constexpr, K_PAD: tl.constexpr
):
    """The k best among the 8 children of each listed parent (ascending, -1 for none), `width` children in all."""
    column = tl.arange(0, N)
    parent = tl.load(parents_ptr + column // 8, mask=column // 8 < parents, other=-1)
    child = parent * 8 + column % 8
    here = (parent >= 0) & (child < width)
    scores = tl.load(scores_ptr + child, mask=here, other=0.0)
    keys = _ordered(scores, here)
    keys = tl.where(here & (child == forced), 2147483647, keys)
    places, number = _places(keys, k)
    _emit(chosen_ptr, child, places, number, k, K_PAD)


@triton.jit
def _choose_listed(
    columns_ptr, columns, scores_ptr, blocks_ptr, visible, chosen_ptr, k, N: tl.constexpr, K_PAD: tl.constexpr
):
    """The k best entries of listed columns of a block list (ascending, -1 for none), as positions."""
    lane = tl.arange(0, N)
    column = tl.load(columns_ptr + lane // 8, mask=lane // 8 < columns, other=-1)
    block = tl.load(blocks_ptr + column, mask=column >= 0, other=-1)
    position = block * 8 + lane % 8
    here = (block >= 0) & (position < visible)
    scores = tl.load(scores_ptr + column * 8 + lane % 8, mask=here, other=0.0)
    places, number = _places(_ordered(scores, here), k)
    _emit(chosen_ptr, position, places, number, k, K_PAD)


@triton.jit
def _choose_everything(number, chosen_ptr, k, K_PAD: tl.constexpr):
    """The first `number` ids, at most k, then -1."""
    column = tl.arange(0, K_PAD)
    tl.store(chosen_ptr + column, tl.where(column < number, column, -1), mask=column < k)


@triton.jit
def _select_in_blocks_kernel(
    scores_ptr,  # fp32 [n, num_blocks * 8]
    block_max_ptr,  # fp32 [n, num_blocks]
    blocks_ptr,  # int32 [n, num_blocks]
    visible_ptr,  # int [n]
    scratch_ptr,  # int32 [n, k]: chosen columns of the list
    chosen_ptr,  # int32 [n, k]
    num_blocks,
    k,
    COLUMNS: tl.constexpr,
    CHILDREN: tl.constexpr,
    K_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    visible = tl.load(visible_ptr + row).to(tl.int32)
    if visible <= tl.minimum(k, num_blocks * 8):
        # Every block is listed and every entry chosen, in its own place.
        _choose_everything(visible, chosen_ptr + row * k, k, K_PAD)
    else:
        blocks_row = blocks_ptr + row * num_blocks
        columns_ptr = scratch_ptr + row * k
        column = tl.arange(0, COLUMNS)
        listed = column < num_blocks
        block = tl.load(blocks_row + column, mask=listed, other=-1)
        maxima = tl.load(block_max_ptr + row * num_blocks + column, mask=listed, other=0.0)
        places, number = _places(_ordered(maxima, (block >= 0) & (block * 8 < visible)), k)
        _emit(columns_ptr, column, places, number, k, K_PAD)
        tl.debug_barrier()
        scores_row = scores_ptr + row * (num_blocks * 8)
        _choose_listed(columns_ptr, k, scores_row, blocks_row, visible, chosen_ptr + row * k, k, CHILDREN, K_PAD)


@triton.jit
def _best_blocks_kernel(
    block_max_ptr,  # fp32 [n, blocks]
    tile_max_ptr,  # fp32 [n, blocks / 8]
    visible_ptr,  # int [n]
    scratch_ptr,  # int32 [n, k]: chosen tiles
    chosen_ptr,  # int32 [n, k]
    blocks,
    k,
    KEEP_NEWEST: tl.constexpr,
    TILES: tl.constexpr,
    CHILDREN: tl.constexpr,
    K_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    seen = tl.minimum(tl.cdiv(tl.load(visible_ptr + row).to(tl.int32), 8), blocks)
    maxima = block_max_ptr + row * blocks
    chosen_row = chosen_ptr + row * k
    # No block or tile has a negative id: nothing is forced.
    newest = seen - 1 if KEEP_NEWEST else -8
    if seen <= k:
        _choose_everything(seen, chosen_row, k, K_PAD)
    elif seen <= CHILDREN:
        _choose_all(maxima, seen, newest, chosen_row, k, CHILDREN, K_PAD)
    else:
        tiles_ptr = scratch_ptr + row * k
        tile_max_row = tile_max_ptr + row * (blocks // 8)
        newest_tile = newest // 8 if KEEP_NEWEST else -8
        _choose_all(tile_max_row, tl.cdiv(seen, 8), newest_tile, tiles_ptr, k, TILES, K_PAD)
        tl.debug_barrier()
        _choose_children(tiles_ptr, k, maxima, seen, newest, chosen_row, k, CHILDREN, K_PAD)


@triton.jit
def _compressed_slots_kernel(
    positions_ptr,  # int [n, k], row stride `positions_row`
    req_to_token_ptr,  # int [requests, context], row stride `request_stride`
    requests_ptr,  # int [n]
    slots_ptr,  # int64 [n, k]
    positions_row,
    request_stride,
    k,
    RATIO: tl.constexpr,
    K_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, K_PAD)
    position = tl.load(positions_ptr + row * positions_row + column, mask=column < k, other=-1).to(tl.int64)
    tokens = req_to_token_ptr + tl.load(requests_ptr + row).to(tl.int64) * request_stride
    token = tl.load(tokens + position * RATIO, mask=position >= 0, other=0).to(tl.int64)
    tl.store(slots_ptr + row * k + column, tl.where(position >= 0, token // RATIO, -1), mask=column < k)


def select_in_blocks(scores: Tensor, block_max: Tensor, blocks: Tensor, visible: Tensor, k: int) -> Tensor:
    rows, num_blocks = check_select(scores, block_max, blocks, visible, k)
    chosen = torch.empty(rows, k, dtype=torch.int32, device=scores.device)
    if rows:
        k_pad = triton.next_power_of_2(k)
        columns, children = max(128, triton.next_power_of_2(num_blocks)), max(128, k_pad * BLOCK_ENTRIES)
        _select_in_blocks_kernel[(rows,)](
            scores,
            block_max,
            blocks,
            visible,
            torch.empty_like(chosen),
            chosen,
            num_blocks,
            k,
            COLUMNS=columns,
            CHILDREN=children,
            K_PAD=k_pad,
            num_warps=_warps(max(columns, children)),
        )
    return chosen


def best_blocks(block_max: Tensor, tile_max: Tensor, visible: Tensor, k: int, *, keep_newest: bool) -> Tensor:
    rows, blocks = check_best_blocks(block_max, tile_max, visible, k)
    chosen = torch.empty(rows, k, dtype=torch.int32, device=block_max.device)
    if rows:
        k_pad = triton.next_power_of_2(k)
        children = max(128, k_pad * TILE_BLOCKS)
        # Two sizes for all contexts, so that a longer one seldom means another kernel to compile.
        tiles = children if blocks // TILE_BLOCKS <= children else MAX_KEYS
        _best_blocks_kernel[(rows,)](
            block_max,
            tile_max,
            visible,
            torch.empty_like(chosen),
            chosen,
            blocks,
            k,
            KEEP_NEWEST=keep_newest,
            TILES=tiles,
            CHILDREN=children,
            K_PAD=k_pad,
            num_warps=_warps(max(tiles, children)),
        )
    return chosen


def compressed_slots(positions: Tensor, req_to_token: Tensor, requests: Tensor, ratio: int) -> Tensor:
    check_rows("positions", positions, (None, None), INT_TYPES)
    rows, k = positions.shape
    check_rows("req_to_token", req_to_token, (None, None), INT_TYPES)
    check_rows("requests", requests, (rows,), INT_TYPES)
    slots = torch.empty(rows, k, dtype=torch.int64, device=positions.device)
    if slots.numel():
        _compressed_slots_kernel[(rows,)](
            positions,
            req_to_token,
            requests,
            slots,
            positions.stride(0),
            req_to_token.stride(0),
            k,
            RATIO=ratio,
            K_PAD=triton.next_power_of_2(k),
            num_warps=4,
        )
    return slots


def select_slots(
    scores: Tensor,
    block_max: Tensor,
    blocks: Tensor,
    visible: Tensor,
    k: int,
    req_to_token: Tensor,
    requests: Tensor,
    ratio: int,
) -> tuple[Tensor, Tensor]:
    positions = select_in_blocks(scores, block_max, blocks, visible, k)
    return positions, compressed_slots(positions, req_to_token, requests, ratio)


def _warps(keys: int) -> int:
    """8 keys per thread, within a program's limits."""
    return min(32, max(4, keys // 256))


def check_select(scores: Tensor, block_max: Tensor, blocks: Tensor, visible: Tensor, k: int) -> tuple[int, int]:
    """(rows, listed blocks) of `select_in_blocks`, whose inputs must be as the module says."""
    rows, width = _check_rows("scores", scores, visible, k)
    num_blocks = width // BLOCK_ENTRIES
    check_rows("block_max", block_max, (rows, num_blocks), (torch.float32,))
    check_rows("blocks", blocks, (rows, num_blocks), (torch.int32,))
    if not (blocks.is_contiguous() and block_max.is_contiguous()):
        raise ValueError(
            f"blocks and block_max must be contiguous, got strides {blocks.stride()}, {block_max.stride()}: copy them"
        )
    if max(num_blocks, k * BLOCK_ENTRIES) > MAX_KEYS:
        raise ValueError(f"{num_blocks} blocks or k = {k} exceed the {MAX_KEYS} keys of a program: list fewer blocks")
    return rows, num_blocks


def check_best_blocks(block_max: Tensor, tile_max: Tensor, visible: Tensor, k: int) -> tuple[int, int]:
    """(rows, blocks) of `best_blocks`, the same."""
    rows, blocks = _check_rows("block_max", block_max, visible, k)
    check_rows("tile_max", tile_max, (rows, blocks // TILE_BLOCKS), (torch.float32,))
    if not tile_max.is_contiguous():
        raise ValueError(f"tile_max must be contiguous, got strides {tile_max.stride()}: copy it first")
    if blocks > MAX_KEYS * TILE_BLOCKS or k * TILE_BLOCKS > MAX_KEYS:
        raise ValueError(
            f"{blocks} blocks or k = {k} is too many: at most {MAX_KEYS * TILE_BLOCKS} blocks and k = "
            f"{MAX_KEYS // TILE_BLOCKS}; split the context or choose fewer"
        )
    return rows, blocks


def _check_rows(name: str, scores: Tensor, visible: Tensor, k: int) -> tuple[int, int]:
    check_rows(name, scores, (None, None), (torch.float32,))
    check_rows("visible", visible, (scores.shape[0],), INT_TYPES)
    if not scores.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {scores.stride()}: copy it first")
    if k < 1:
        raise ValueError(f"k is {k}: choose at least one")
    return scores.shape
