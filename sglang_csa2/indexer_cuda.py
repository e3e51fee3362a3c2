"""Score -> candidate pool -> Top-K -> slots on a GPU. The contract is that of `Indexer.choose`.

A scan leaves the maxima of blocks of 8 entries, no scores. The best blocks of a row hold its best entries, so they
alone are scored again; for the candidate source they are its pool as well. A consumer starts from that pool, fetches
and scores only its blocks. So every layer ends in the same step, whose cost does not depend on the context. Rows
that see no more entries than their best blocks hold skip the scan, rows that see at most Top-K skip the scores.

A decode runs in fixed shapes and may be captured: buffers are as wide as the metadata's bound, the work follows the
live lengths on the device. A prefill loops over requests with the host's numbers. Both cut their rows into tiles
under a budget, so that no buffer grows with rows times context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_csa2 import routes
from sglang_csa2.config import Csa2Config
from sglang_csa2.indexer import Indexer
from sglang_csa2.kernels import (
    cuda_index_decode,
    cuda_index_scores,
    cuda_topk,
    triton_index_scores,
    triton_topk,
)
from sglang_csa2.kernels.triton_index_scores import BLOCK_ENTRIES, TILE_ENTRIES
from sglang_csa2.layer_plan import LayerPlan
from sglang_csa2.metadata import Csa2Metadata
from sglang_csa2.selection import TopK

# Bytes of fp32 maxima or scores that one tile of rows may hold: 455 rows of a scan of 1M entries, 4096 rows of pools.
_TILE_BYTES = 256 << 20


class Kernels(NamedTuple):
    """The kernels of an indexer; each one's contract is told in its Triton form.

    build: loads what a first call would load otherwise.
    """

    block_maxima: Callable[..., triton_index_scores.Maxima]
    block_maxima_prefill: Callable[..., triton_index_scores.Maxima]
    index_scores_candidates: Callable[..., tuple[Tensor, Tensor]]
    best_blocks: Callable[..., Tensor]
    select_slots: Callable[..., tuple[Tensor, Tensor]]
    build: Callable[[], None]


def triton_kernels() -> Kernels:
    """The portable form. Triton builds a kernel at its first call."""
    return Kernels(
        block_maxima=triton_index_scores.block_maxima,
        block_maxima_prefill=triton_index_scores.block_maxima_prefill,
        index_scores_candidates=triton_index_scores.index_scores_candidates,
        best_blocks=triton_topk.best_blocks,
        select_slots=triton_topk.select_slots,
        build=lambda: None,
    )


def cuda_kernels() -> Kernels:
    """The form for Hopper."""

    def build() -> None:
        cuda_index_decode.library()
        cuda_index_scores.library()
        cuda_topk.library()

    return Kernels(
        block_maxima=cuda_index_decode.block_maxima,
        block_maxima_prefill=cuda_index_scores.block_maxima_prefill,
        index_scores_candidates=cuda_index_decode.index_scores_candidates,
        best_blocks=cuda_topk.best_blocks,
        select_slots=cuda_topk.select_slots,
        build=build,
    )


# By the names that the table of routes has for them.
KERNELS = {"cuda": cuda_kernels, "triton": triton_kernels}


def cuda_problem(config: Csa2Config) -> str | None:
    """Why the CUDA C++ kernels cannot serve a model, or None."""
    most = max(config.index_topk, config.candidate_topk_blocks)
    if config.index_n_heads > cuda_index_decode.MAX_HEADS:
        return f"the CUDA C++ kernels score up to {cuda_index_decode.MAX_HEADS} index heads, not {config.index_n_heads}"
    if most > cuda_topk.MAX_CHOSEN:
        return f"the CUDA C++ kernels choose up to {cuda_topk.MAX_CHOSEN}, not {most}"
    return None


class _Tile(NamedTuple):
    """Rows worked off together. request: int64 [1] in a prefill, whose tiles are of one request; longest: its bound."""

    rows: slice
    request: Tensor | None
    longest: int


class CudaIndexer(Indexer):
    """The GPU routes. kernels: a name of `KERNELS`."""

    def __init__(self, plan: LayerPlan, kernels: str = "triton"):
        super().__init__(plan)
        self._kernels = KERNELS[kernels]()
        if self.config.candidate_source_layer_id is not None and (self.config.candidate_block_size != BLOCK_ENTRIES):
            raise ValueError(
                f"candidate_block_size is {self.config.candidate_block_size}: the GPU kernels keep maxima of blocks "
                f"of {BLOCK_ENTRIES}; serve this model on the CPU"
            )

    def in_place(self) -> dict[str, str]:
        kernels = self._kernels
        return {
            routes.SCAN: routes.route_of(kernels.block_maxima),
            routes.CANDIDATES: routes.route_of(kernels.index_scores_candidates),
            routes.TOPK: routes.route_of(kernels.select_slots),
        }

    def warm_up(self, context: int, device: torch.device) -> None:
        """Build the kernels, those too that only a context beyond the server's own warm-up needs, up to `context`."""
        self._kernels.build()
        topk, pool = self.config.index_topk, self.config.candidate_topk_blocks
        visible = torch.zeros(1, dtype=torch.int64, device=device)
        sizes = [(topk, False)] + [(pool, True)] * (self.config.candidate_source_layer_id is not None)

        def empty(columns: int) -> Tensor:
            return torch.empty(1, columns, dtype=torch.float32, device=device)

        for number, keep_newest in sizes:
            for entries in (TILE_ENTRIES, _round_up(context)):
                maxima = empty(entries // BLOCK_ENTRIES), empty(entries // TILE_ENTRIES)
                self._kernels.best_blocks(*maxima, visible, number, keep_newest=keep_newest)
            blocks = torch.full((1, number), -1, dtype=torch.int32, device=device)
            scores = empty(number * BLOCK_ENTRIES)
            table = torch.zeros(1, 1, dtype=torch.int32, device=device)
            self._kernels.select_slots(scores, empty(number), blocks, visible, topk, table, visible, 1)

    def _choose(self, layer, q, weights, cache, meta, consumed: Tensor | None) -> tuple[TopK, Tensor | None]:
        weights = weights.contiguous()
        # A graph is captured once for all lengths, so its decode always publishes.
        publishes = self._wants_pool(layer, meta) or (meta.groups is None and layer.is_candidate_source)
        tiles, chosen, pools = list(self._tiles(layer, meta, consumed is not None)), [], []
        for tile in tiles:
            part = (q[tile.rows], weights[tile.rows], cache, meta.tables.req_to_token)
            if consumed is None:
                blocks, pool = self._best_blocks(layer, part, meta, tile, publishes)
                pools.append(pool)
            else:
                blocks = consumed[tile.rows]
            chosen.append(self._choose_in_blocks(layer, part, meta, tile, blocks))
        topk = TopK(*(_joined(tiles, list(parts), meta) for parts in zip(*chosen, strict=True)))
        return topk, _joined(tiles, pools, meta) if publishes else None

    def _best_blocks(self, layer, part, meta, tile: _Tile, publishes: bool) -> tuple[Tensor, Tensor | None]:
        """Blocks that hold a tile's Top-K, and its candidate pool if the layer publishes one; both int32 [rows, b]."""
        topk, pool_blocks = self.config.index_topk, self.config.candidate_topk_blocks
        # One place of the pool is the newest block's.
        pool_serves_both = publishes and pool_blocks > topk
        selections = ([] if pool_serves_both else [topk]) + ([pool_blocks] if publishes else [])
        # Rows whose blocks all fit every selection need no maxima.
        skip = min(selections) * BLOCK_ENTRIES
        visible = meta.ratios[layer.ratio].visible[tile.rows]
        width = _round_up(tile.longest // layer.ratio)
        if tile.request is None:
            scan, requests = self._kernels.block_maxima, meta.requests[tile.rows]
        else:
            scan, requests = self._kernels.block_maxima_prefill, tile.request
        maxima = scan(*part, requests, visible, layer.ratio, width, skip=skip)
        pool = self._kernels.best_blocks(*maxima, visible, pool_blocks, keep_newest=True) if publishes else None
        if pool_serves_both:
            return pool, pool
        return self._kernels.best_blocks(*maxima, visible, topk, keep_newest=False), pool

    def _choose_in_blocks(self, layer, part, meta, tile: _Tile, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Top-K positions int32 [rows, topk] among the entries of each row's blocks, and their slots."""
        requests, visible = meta.requests[tile.rows], meta.ratios[layer.ratio].visible[tile.rows]
        topk = self.config.index_topk
        skip = min(topk, blocks.shape[1] * BLOCK_ENTRIES)
        logits, maxima = self._kernels.index_scores_candidates(*part, requests, visible, layer.ratio, blocks, skip=skip)
        table = meta.tables.req_to_token
        return self._kernels.select_slots(logits, maxima, blocks, visible, topk, table, requests, layer.ratio)

    def _tiles(self, layer, meta: Csa2Metadata, in_pool: bool) -> Iterator[_Tile]:
        """A decode's rows, or a prefill's request by request, cut under the budget."""
        if meta.groups is None:
            yield from self._cut(0, meta.num_rows, None, layer, meta.longest, in_pool)
            return
        for group in meta.groups:
            count = group.rows.shape[1]
            for member, start in enumerate(group.starts):
                request = group.requests[member : member + 1]
                yield from self._cut(start, count, request, layer, group.longest, in_pool)

    def _cut(self, start, count, request, layer, longest, in_pool) -> Iterator[_Tile]:
        scan = 0 if in_pool else _round_up(longest // layer.ratio) // BLOCK_ENTRIES
        listed = max(self.config.index_topk * BLOCK_ENTRIES, self.config.candidate_pool_entries)
        height = max(1, _TILE_BYTES // (4 * max(scan, listed)))
        for top in range(start, start + count, height):
            yield _Tile(slice(top, min(top + height, start + count)), request, longest)


def _joined(tiles: list[_Tile], parts: list[Tensor], meta: Csa2Metadata) -> Tensor:
    """The tiles' results in the order of the rows."""
    if len(parts) == 1:
        return parts[0]
    whole = parts[0].new_empty(meta.num_rows, parts[0].shape[1])
    for tile, part in zip(tiles, parts, strict=True):
        whole[tile.rows] = part
    return whole


def _round_up(entries: int) -> int:
    """A width the scan takes: whole tiles, at least one."""
    tile = TILE_ENTRIES
    return max(tile, -(-entries // tile) * tile)
