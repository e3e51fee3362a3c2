"""Index scores on CUDA: sum over heads of relu(q . k) w, over paged index K (spec 2.6).

    block_maxima(q bf16 [n, heads, 128], weights bf16 [n, heads], cache uint8 [pages, 64 * 68],
                 req_to_token int [requests, context], requests int [n], visible int [n], ratio, width, skip)
        -> Maxima(blocks fp32 [n, width / 8], tiles fp32 [n, width / 64])
    block_maxima_prefill(same, requests int [1])  many rows of one request -> Maxima
    index_scores_candidates(..., visible, ratio, blocks int32 [n, b], skip)   only the entries of these blocks
        -> (fp32 [n, b * 8], their maxima per block fp32 [n, b])

A scan keeps no scores, only the maxima of blocks of 8 entries and tiles of 64: a row's k best entries lie in its k
best blocks (triton_topk.py), which are scored again, so no buffer is as wide as the context.

Row i scores its entries 0 .. visible[i] - 1 of request `requests[i]`. Nothing is read or written past them (work
follows `visible` on the device, not `width`), except that a maximum which covers at least one visible entry is
written, over its visible entries. The candidate form writes its whole output: -inf where a block is -1 or an
entry is not visible. A row with visible <= skip needs no scores, because all that it sees is chosen: a decode row is
then not touched at all, a prefill row may be.

Entry j lives in slot `req_to_token[request, j * ratio] // ratio`, and the entries of one 256-token page are
adjacent, so a page is looked up once per tile. q holds values on the FP4 grid.

Roundings: products of FP4-grid values are exact in bf16 operands and accumulate in fp32; relu, the weight
and the sum over heads stay in fp32. The published code rounds each product, each weighted product and the sum to bf16;
the scores here are those before these roundings, so that selections differ from it where its bf16 values tie.

A program decodes a tile of keys once: into registers, as dims modulo 4 (a 16-bit word holds four), then through
shared memory into tensor-core dots against the row's heads, keys along M. Decode programs walk the tiles of a row
with a stride and fetch the next tile's bytes before they work on the current ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_csa2.kernels.triton_records import (
    INT_TYPES,
    UNSHIFT,
    check_rows,
    decode_e2m1_quarters,
    e2m1_multiplier,
    uses_inline_ptx,
)
from sglang_csa2.layout import INDEX_K, INDEX_PAGE_BYTES, INDEX_PAGE_SCALE_OFFSET, INDEX_PAGE_SLOTS, PAGE_TOKENS

BLOCK_ENTRIES = 8
TILE_ENTRIES = 64

# Programs that a decode launch aims for: several per multiprocessor, so that loads overlap. From a sweep on one H200
# (64 or 128 keys, 4 or 8 warps, 4 to 48 programs per multiprocessor) at 1 x 1M, 8 x 1M, 8 x 64K and 32 x 16K: 8 warps
# lose a fifth, the rest lie within 10 % of each other.
_DECODE_PROGRAMS = 132 * 12
_DECODE_TILE = {"BLOCK_N": 128, "num_warps": 4}
_CANDIDATE_TILE = {"BLOCK_N": 128, "num_warps": 4}
_PREFILL_TILE = {"BLOCK_N": 128, "BLOCK_ROWS": 32, "num_warps": 4, "num_stages": 3}


class Maxima(NamedTuple):
    """Maxima of a scan's scores: blocks fp32 [n, width / 8], tiles fp32 [n, width / 64]."""

    blocks: Tensor
    tiles: Tensor


@triton.jit
def _load_q(q_ptr, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr):
    """A row's dims 0, 1, 2, 3 modulo 4: bf16 [32, HEADS_PAD] each, zero for padding heads."""
    head = tl.arange(0, HEADS_PAD)[None, :]
    dims = q_ptr + head * 128 + 4 * tl.arange(0, 32)[:, None]
    there = head < HEADS
    zero = tl.load(dims, mask=there, other=0.0)
    one = tl.load(dims + 1, mask=there, other=0.0)
    two = tl.load(dims + 2, mask=there, other=0.0)
    three = tl.load(dims + 3, mask=there, other=0.0)
    return zero, one, two, three


@triton.jit
def _load_keys(cache_ptr, slots, present, page_stride):
    """Packed keys of int64 slots [n]: int16 [n, 32] of four nibbles and int32 [n] of four scale bytes."""
    page = cache_ptr + (slots // 64) * page_stride
    offset = slots % 64
    words = (page + offset * 64).to(tl.pointer_type(tl.int16))[:, None] + tl.arange(0, 32)[None, :]
    data = tl.load(words, mask=present[:, None], other=0)
    scales = tl.load((page + 4096 + offset * 4).to(tl.pointer_type(tl.int32)), mask=present, other=0)
    return data, scales


@triton.jit
def _decode_keys(data, scales, PTX: tl.constexpr):
    """-> dims 0, 1, 2, 3 modulo 4, bf16 [n, 32] each, over UNSHIFT."""
    count: tl.constexpr = data.shape[0]
    scale = (scales[:, None] >> (8 * tl.arange(0, 4))[None, :]) & 0xFF
    multiplier = e2m1_multiplier(scale)[:, :, None]
    zero, one, two, three = decode_e2m1_quarters(tl.reshape(data, (count, 4, 8)), multiplier, PTX)
    zero, one = tl.reshape(zero, (count, 32)), tl.reshape(one, (count, 32))
    return zero, one, tl.reshape(two, (count, 32)), tl.reshape(three, (count, 32))


@triton.jit
def _score(k_zero, k_one, k_two, k_three, q_zero, q_one, q_two, q_three, weights):
    """Keys bf16 [n, 32] and q bf16 [32, heads] by dims modulo 4, weights fp32 [heads] -> fp32 [n]."""
    products = tl.dot(k_one, q_one, tl.dot(k_zero, q_zero))
    products = tl.dot(k_three, q_three, tl.dot(k_two, q_two, products))
    return tl.sum(tl.maximum(products, 0.0) * weights[None, :], axis=1) * UNSHIFT


@triton.jit
def _store_maxima(scores, first, visible, block_max_ptr, tile_max_ptr, BLOCK_N: tl.constexpr):
    scores = tl.where(first + tl.arange(0, BLOCK_N) < visible, scores, float("-inf"))
    block = first // 8 + tl.arange(0, BLOCK_N // 8)
    block_max = tl.max(tl.reshape(scores, (BLOCK_N // 8, 8)), axis=1)
    tl.store(block_max_ptr + block, block_max, mask=block * 8 < visible)
    tile = first // 64 + tl.arange(0, BLOCK_N // 64)
    tile_max = tl.max(tl.reshape(block_max, (BLOCK_N // 64, 8)), axis=1)
    tl.store(tile_max_ptr + tile, tile_max, mask=tile * 64 < visible)


@triton.jit
def _tile_slot(req_to_token_row, tile, tiles, RATIO: tl.constexpr, BLOCK_N: tl.constexpr):
    """Slot of a tile's first entry, int64; 0 past the last tile."""
    token = tl.load(req_to_token_row + tile.to(tl.int64) * (BLOCK_N * RATIO), mask=tile < tiles, other=0)
    return token.to(tl.int64) // RATIO


@triton.jit
def _block_maxima_kernel(
    q_ptr,  # bf16 [n, HEADS, 128] contiguous
    weights_ptr,  # bf16 [n, HEADS] contiguous
    cache_ptr,  # uint8 [pages, 64 * 64 data | 64 * 4 scales], row stride `page_stride`
    req_to_token_ptr,  # int [requests, context], row stride `request_stride`
    requests_ptr,  # int [n]
    visible_ptr,  # int [n]
    block_max_ptr,  # fp32 [n, width / 8]
    tile_max_ptr,  # fp32 [n, width / 64]
    page_stride,
    request_stride,
    width,
    skip,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    RATIO: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PTX: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0)
    step = tl.num_programs(0)
    visible = tl.minimum(tl.load(visible_ptr + row).to(tl.int32), width)
    tiles = tl.where(visible > skip, tl.cdiv(visible, BLOCK_N), 0)
    if tile < tiles:
        req_to_token_row = req_to_token_ptr + tl.load(requests_ptr + row).to(tl.int64) * request_stride
        head = tl.arange(0, HEADS_PAD)
        weights = tl.load(weights_ptr + row * HEADS + head, mask=head < HEADS, other=0.0).to(tl.float32)
        q_zero, q_one, q_two, q_three = _load_q(q_ptr + row * (HEADS * 128), HEADS, HEADS_PAD)
        block_max_row = block_max_ptr + row * (width // 8)
        tile_max_row = tile_max_ptr + row * (width // 64)
        lane = tl.arange(0, BLOCK_N)
        slot = _tile_slot(req_to_token_row, tile, tiles, RATIO, BLOCK_N)
        data, scales = _load_keys(cache_ptr, slot + lane, tile * BLOCK_N + lane < visible, page_stride)
        slot = _tile_slot(req_to_token_row, tile + step, tiles, RATIO, BLOCK_N)
        while tile < tiles:
            ahead = (tile + step) * BLOCK_N + lane < visible
            next_data, next_scales = _load_keys(cache_ptr, slot + lane, ahead, page_stride)
            slot = _tile_slot(req_to_token_row, tile + 2 * step, tiles, RATIO, BLOCK_N)
            k_zero, k_one, k_two, k_three = _decode_keys(data, scales, PTX)
            scores = _score(k_zero, k_one, k_two, k_three, q_zero, q_one, q_two, q_three, weights)
            _store_maxima(scores, tile * BLOCK_N, visible, block_max_row, tile_max_row, BLOCK_N)
            data, scales = next_data, next_scales
            tile += step


@triton.jit
def _index_scores_candidates_kernel(
    q_ptr,  # bf16 [n, HEADS, 128] contiguous
    weights_ptr,  # bf16 [n, HEADS] contiguous
    cache_ptr,  # uint8 [pages, 64 * 64 data | 64 * 4 scales], row stride `page_stride`
    req_to_token_ptr,  # int [requests, context], row stride `request_stride`
    requests_ptr,  # int [n]
    visible_ptr,  # int [n]
    blocks_ptr,  # int32 [n, num_blocks]
    logits_ptr,  # fp32 [n, num_blocks * 8]
    block_max_ptr,  # fp32 [n, num_blocks]
    page_stride,
    request_stride,
    num_blocks,
    skip,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    RATIO: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PTX: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    visible = tl.load(visible_ptr + row).to(tl.int32)
    if visible > skip:
        listed = column < num_blocks * 8
        block = tl.load(blocks_ptr + row * num_blocks + column // 8, mask=listed, other=-1)
        entry = block * 8 + column % 8
        present = (block >= 0) & (entry < visible)
        scores = tl.full((BLOCK_N,), float("-inf"), tl.float32)
        if tl.max(present.to(tl.int32), axis=0) > 0:
            req_to_token_row = req_to_token_ptr + tl.load(requests_ptr + row).to(tl.int64) * request_stride
            token = tl.load(req_to_token_row + entry.to(tl.int64) * RATIO, mask=present, other=0)
            data, scales = _load_keys(cache_ptr, token.to(tl.int64) // RATIO, present, page_stride)
            head = tl.arange(0, HEADS_PAD)
            weights = tl.load(weights_ptr + row * HEADS + head, mask=head < HEADS, other=0.0).to(tl.float32)
            q_zero, q_one, q_two, q_three = _load_q(q_ptr + row * (HEADS * 128), HEADS, HEADS_PAD)
            k_zero, k_one, k_two, k_three = _decode_keys(data, scales, PTX)
            scores = _score(k_zero, k_one, k_two, k_three, q_zero, q_one, q_two, q_three, weights)
            scores = tl.where(present, scores, float("-inf"))
        tl.store(logits_ptr + row * (num_blocks * 8) + column, scores, mask=listed)
        index = tl.program_id(0) * (BLOCK_N // 8) + tl.arange(0, BLOCK_N // 8)
        block_max = tl.max(tl.reshape(scores, (BLOCK_N // 8, 8)), axis=1)
        tl.store(block_max_ptr + row * num_blocks + index, block_max, mask=index < num_blocks)


@triton.jit
def _block_maxima_prefill_kernel(
    q_ptr,  # bf16 [n, 4, 32, HEADS_PAD] contiguous: dims by their residue modulo 4, zero for padding heads
    weights_ptr,  # bf16 [n, HEADS] contiguous
    cache_ptr,  # uint8 [pages, 64 * 64 data | 64 * 4 scales], row stride `page_stride`
    req_to_token_ptr,  # int [requests, context], row stride `request_stride`
    request_ptr,  # int [1]
    visible_ptr,  # int [n]
    block_max_ptr,  # fp32 [n, width / 8]
    tile_max_ptr,  # fp32 [n, width / 64]
    page_stride,
    request_stride,
    width,
    skip,
    rows,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    RATIO: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PTX: tl.constexpr,
):
    first_row = tl.program_id(1) * BLOCK_ROWS
    last_row = tl.minimum(first_row + BLOCK_ROWS, rows)
    first = tl.program_id(0) * BLOCK_N
    member = first_row + tl.arange(0, BLOCK_ROWS)
    longest = tl.max(tl.load(visible_ptr + member, mask=member < rows, other=0).to(tl.int32), axis=0)
    longest = tl.minimum(longest, width)
    if (first < longest) & (longest > skip):
        lane = tl.arange(0, BLOCK_N)
        req_to_token_row = req_to_token_ptr + tl.load(request_ptr).to(tl.int64) * request_stride
        slot = _tile_slot(req_to_token_row, tl.program_id(0), tl.program_id(0) + 1, RATIO, BLOCK_N)
        data, scales = _load_keys(cache_ptr, slot + lane, first + lane < longest, page_stride)
        k_zero, k_one, k_two, k_three = _decode_keys(data, scales, PTX)
        head = tl.arange(0, HEADS_PAD)
        q_tile = tl.arange(0, 32)[:, None] * HEADS_PAD + head[None, :]
        for index in tl.range(0, last_row - first_row):
            row = first_row.to(tl.int64) + index
            q_row = q_ptr + row * (128 * HEADS_PAD) + q_tile
            q_zero, q_one = tl.load(q_row), tl.load(q_row + 32 * HEADS_PAD)
            q_two, q_three = tl.load(q_row + 64 * HEADS_PAD), tl.load(q_row + 96 * HEADS_PAD)
            weights = tl.load(weights_ptr + row * HEADS + head, mask=head < HEADS, other=0.0).to(tl.float32)
            visible = tl.minimum(tl.load(visible_ptr + row).to(tl.int32), width)
            scores = _score(k_zero, k_one, k_two, k_three, q_zero, q_one, q_two, q_three, weights)
            block_max_row = block_max_ptr + row * (width // 8)
            tile_max_row = tile_max_ptr + row * (width // 64)
            _store_maxima(scores, first, visible, block_max_row, tile_max_row, BLOCK_N)


def block_maxima(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    req_to_token: Tensor,
    requests: Tensor,
    visible: Tensor,
    ratio: int,
    width: int,
    *,
    skip: int = 0,
) -> Maxima:
    rows, heads = check_tensors(q, weights, cache, req_to_token, visible, ratio)
    check_rows("requests", requests, (rows,), INT_TYPES)
    maxima = room_for_maxima(rows, width, q.device)
    tiles = triton.cdiv(width, _DECODE_TILE["BLOCK_N"])
    if rows and tiles:
        programs = min(tiles, max(1, triton.cdiv(_DECODE_PROGRAMS, rows)))
        _block_maxima_kernel[(programs, rows)](
            q,
            weights,
            cache,
            req_to_token,
            requests,
            visible,
            *maxima,
            cache.stride(0),
            req_to_token.stride(0),
            width,
            skip,
            HEADS=heads,
            HEADS_PAD=_padded(heads),
            RATIO=ratio,
            PTX=uses_inline_ptx(),
            **_DECODE_TILE,
        )
    return maxima


def index_scores_candidates(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    req_to_token: Tensor,
    requests: Tensor,
    visible: Tensor,
    ratio: int,
    blocks: Tensor,
    *,
    skip: int = -1,
) -> tuple[Tensor, Tensor]:
    rows, heads = check_tensors(q, weights, cache, req_to_token, visible, ratio)
    check_rows("requests", requests, (rows,), INT_TYPES)
    num_blocks = check_listed(blocks, rows)
    logits = torch.empty(rows, num_blocks * BLOCK_ENTRIES, dtype=torch.float32, device=q.device)
    block_max = torch.empty(rows, num_blocks, dtype=torch.float32, device=q.device)
    if logits.numel():
        grid = (triton.cdiv(logits.shape[1], _CANDIDATE_TILE["BLOCK_N"]), rows)
        _index_scores_candidates_kernel[grid](
            q,
            weights,
            cache,
            req_to_token,
            requests,
            visible,
            blocks,
            logits,
            block_max,
            cache.stride(0),
            req_to_token.stride(0),
            num_blocks,
            skip,
            HEADS=heads,
            HEADS_PAD=_padded(heads),
            RATIO=ratio,
            PTX=uses_inline_ptx(),
            **_CANDIDATE_TILE,
        )
    return logits, block_max


def block_maxima_prefill(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    req_to_token: Tensor,
    request: Tensor,
    visible: Tensor,
    ratio: int,
    width: int,
    *,
    skip: int = 0,
) -> Maxima:
    rows, heads = check_tensors(q, weights, cache, req_to_token, visible, ratio)
    check_rows("request", request, (1,), INT_TYPES)
    maxima = room_for_maxima(rows, width, q.device)
    if rows and width:
        grid = (triton.cdiv(width, _PREFILL_TILE["BLOCK_N"]), triton.cdiv(rows, _PREFILL_TILE["BLOCK_ROWS"]))
        _block_maxima_prefill_kernel[grid](
            _split_q(q, _padded(heads)),
            weights,
            cache,
            req_to_token,
            request,
            visible,
            *maxima,
            cache.stride(0),
            req_to_token.stride(0),
            width,
            skip,
            rows,
            HEADS=heads,
            HEADS_PAD=_padded(heads),
            RATIO=ratio,
            PTX=uses_inline_ptx(),
            **_PREFILL_TILE,
        )
    return maxima


def _split_q(q: Tensor, heads_pad: int) -> Tensor:
    """bf16 [n, heads, 128] -> contiguous [n, 4, 32, heads_pad], so that a row's tile loads in order."""
    rows, heads, dims = q.shape
    split = q.new_zeros(rows, 4, dims // 4, heads_pad) if heads < heads_pad else None
    turned = q.view(rows, heads, dims // 4, 4).permute(0, 3, 2, 1)
    if split is None:
        return turned.contiguous()
    split[..., :heads] = turned
    return split


def _padded(heads: int) -> int:
    # 16 is the least that a tensor-core tile takes.
    return max(16, triton.next_power_of_2(heads))


def room_for_maxima(rows: int, width: int, device: torch.device) -> Maxima:
    """Where a scan of `width` entries leaves its maxima."""
    if width % TILE_ENTRIES:
        raise ValueError(f"width is {width}, not a multiple of {TILE_ENTRIES}: round it up, the excess is not touched")
    sizes = (width // BLOCK_ENTRIES, width // TILE_ENTRIES)
    return Maxima(*(torch.empty(rows, size, dtype=torch.float32, device=device) for size in sizes))


def check_listed(blocks: Tensor, rows: int) -> int:
    """The number of blocks that each row lists."""
    check_rows("blocks", blocks, (rows, None), (torch.int32,))
    if not blocks.is_contiguous():
        raise ValueError(f"blocks must be contiguous, got strides {blocks.stride()}: copy them first")
    return blocks.shape[1]


def check_tensors(
    q: Tensor, weights: Tensor, cache: Tensor, req_to_token: Tensor, visible: Tensor, ratio: int
) -> tuple[int, int]:
    """(rows, heads) of a scan's inputs, which must be as the module says."""
    check_rows("q", q, (None, None, INDEX_K.dims), (torch.bfloat16,))
    rows, heads, _ = q.shape
    check_rows("weights", weights, (rows, heads), (torch.bfloat16,))
    check_rows("cache", cache, (None, INDEX_PAGE_BYTES), (torch.uint8,))
    check_rows("req_to_token", req_to_token, (None, None), INT_TYPES)
    check_rows("visible", visible, (rows,), INT_TYPES)
    if not (q.is_contiguous() and weights.is_contiguous()):
        raise ValueError(
            f"q and weights must be contiguous, got strides {q.stride()} and {weights.stride()}: copy them first"
        )
    # The kernels hold these numbers as literals.
    if (INDEX_PAGE_SLOTS, INDEX_PAGE_SCALE_OFFSET) != (64, 4096):
        raise ValueError(f"index pages of {INDEX_PAGE_SLOTS} slots are not served: the kernels are written for 64")
    if ratio not in (1, 2) or PAGE_TOKENS // ratio % _DECODE_TILE["BLOCK_N"]:
        raise ValueError(f"ratio is {ratio}: a tile of keys must lie in one page, so only 1 and 2 are served")
    return rows, heads
