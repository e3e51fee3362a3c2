"""Score -> candidate pool -> Top-K -> slots on CUDA: the triton route. The contract is that of `Indexer.choose`.

A decode runs in fixed shapes and may be captured: buffers are as wide as the metadata's bound, the work follows the
live lengths on the device. A consumer fetches and scores only its pool's blocks. A prefill loops over requests with
the host's numbers and cuts their rows into tiles under a budget.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sglang_csa2.indexer import Indexer
from sglang_csa2.kernels import triton_index_scores as scoring
from sglang_csa2.kernels import triton_topk as selecting
from sglang_csa2.layer_plan import LayerPlan, LayerSpec
from sglang_csa2.metadata import Csa2Metadata

# Bytes of fp32 scores that one tile of prefill rows may hold.
_TILE_BYTES = 512 << 20


class CudaIndexer(Indexer):
    """The triton route."""

    def __init__(self, plan: LayerPlan):
        super().__init__(plan)
        if self.config.candidate_source_layer_id is not None and (
            self.config.candidate_block_size != scoring.BLOCK_ENTRIES
        ):
            raise ValueError(
                f"candidate_block_size is {self.config.candidate_block_size}: the GPU kernels keep maxima of blocks "
                f"of {scoring.BLOCK_ENTRIES}; serve this model on the CPU"
            )

    def _choose(self, layer, q, weights, cache, meta, consumed: Tensor | None) -> tuple[Tensor, Tensor | None]:
        weights = weights.contiguous()
        route = self._decode if meta.groups is None else self._prefill
        return route(layer, q, weights, cache, meta, consumed)

    def _slots(self, positions: Tensor, layer: LayerSpec, meta: Csa2Metadata) -> Tensor:
        return selecting.compressed_slots(positions, meta.tables.req_to_token, meta.requests, layer.ratio)

    def _decode(self, layer, q, weights, cache, meta, consumed) -> tuple[Tensor, Tensor | None]:
        table, requests = meta.tables.req_to_token, meta.requests
        visible = meta.ratios[layer.ratio].visible
        if consumed is not None:
            return self._choose_in_pool(layer, q, weights, cache, meta, requests, visible, consumed), None
        width = _round_up(meta.longest // layer.ratio)
        scores = scoring.index_scores(q, weights, cache, table, requests, visible, layer.ratio, width)
        return self._select(layer, scores, visible, wants_pool=layer.is_candidate_source)

    def _prefill(self, layer, q, weights, cache, meta, consumed) -> tuple[Tensor, Tensor | None]:
        rows_visible = meta.ratios[layer.ratio].visible
        positions = torch.empty(meta.num_rows, self.config.index_topk, dtype=torch.int32, device=q.device)
        wants_pool = self._wants_pool(layer, meta)
        published = None
        if wants_pool:
            published = torch.empty(
                meta.num_rows, self.config.candidate_topk_blocks, dtype=torch.int32, device=q.device
            )
        for rows, request, longest in self._tiles(layer, meta, consumed is not None):
            visible = rows_visible[rows]
            if consumed is not None:
                positions[rows] = self._choose_in_pool(
                    layer, q[rows], weights[rows], cache, meta, meta.requests[rows], visible, consumed[rows]
                )
                continue
            width = _round_up(longest // layer.ratio)
            scores = scoring.index_scores_prefill(
                q[rows], weights[rows], cache, meta.tables.req_to_token, request, visible, layer.ratio, width
            )
            positions[rows], pool = self._select(layer, scores, visible, wants_pool=wants_pool)
            if published is not None:
                published[rows] = pool
        return positions, published

    def _select(self, layer, scores, visible, *, wants_pool: bool) -> tuple[Tensor, Tensor | None]:
        positions = selecting.select_topk(
            scores.logits, visible, self.config.index_topk, block_max=scores.block_max, tile_max=scores.tile_max
        )
        if not wants_pool:
            return positions, None
        return positions, selecting.candidate_blocks(
            scores.block_max, scores.tile_max, visible, self.config.candidate_topk_blocks
        )

    def _choose_in_pool(self, layer, q, weights, cache, meta, requests, visible, blocks) -> Tensor:
        table = meta.tables.req_to_token
        logits, maxima = scoring.index_scores_candidates(
            q, weights, cache, table, requests, visible, layer.ratio, blocks
        )
        return selecting.select_in_blocks(logits, maxima, blocks, visible, self.config.index_topk)

    def _tiles(self, layer, meta: Csa2Metadata, in_pool: bool) -> Iterator[tuple[slice, Tensor, int]]:
        """Runs of rows of one request, the request's slot [1] and a bound on its context."""
        for group in meta.groups:
            width = self.config.candidate_pool_entries if in_pool else _round_up(group.longest // layer.ratio)
            height = max(1, _TILE_BYTES // (max(width, 1) * 4))
            count = group.rows.shape[1]
            for member, start in enumerate(group.starts):
                for top in range(0, count, height):
                    rows = slice(start + top, start + min(top + height, count))
                    yield rows, group.requests[member : member + 1], group.longest


def _round_up(entries: int) -> int:
    """A width the score kernels take: whole tiles, at least one."""
    tile = scoring.TILE_ENTRIES
    return max(tile, -(-entries // tile) * tile)
