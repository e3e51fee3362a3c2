"""Score -> candidate pool -> Top-K -> slots, for one index-source layer (spec 2.6, 2.7): what the routes
share, and the torch route.

A Full layer or a Reindex layer without candidates scans what its rows see. The candidate source does the same
and keeps the best blocks of each row as its pool. A consumer fetches and scores only the pool's entries, so its
cost does not depend on the context.

Rows are worked off in tiles, so that no buffer grows with rows times context.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sglang_csa2 import routes, trace
from sglang_csa2.kernels.index_scores import gather_index_k, index_scores
from sglang_csa2.kernels.topk import block_entries, candidate_blocks, select_topk
from sglang_csa2.layer_plan import LayerPlan, LayerSpec
from sglang_csa2.metadata import Csa2Metadata, RowGroup
from sglang_csa2.selection import TopK

# Bytes of per-head products (fp32) that one tile of rows may hold.
_TILE_BYTES = 64 << 20


class Indexer:
    """What the routes share: which pool a layer consumes, whether it publishes one, and the publishing.

    Holds no state of a forward.
    """

    def __init__(self, plan: LayerPlan):
        self.config = plan.config
        self.trace = trace.recorder(plan)

    def warm_up(self, context: int, device: torch.device) -> None:
        """Build what a request of up to `context` tokens may need; nothing on the torch route."""

    def choose(self, layer: LayerSpec, q: Tensor, weights: Tensor, cache: Tensor, meta: Csa2Metadata) -> None:
        """Publish a layer's Top-K, and its pool if it is the candidate source, on `meta.selection`.

        Args:
            layer: the index-source layer.
            q: bf16 [rows, heads, 128], roped and on the FP4 grid.
            weights: bf16 [rows, heads], the scale folded in.
            cache: uint8 index-K cache of the layer's kv_source.
            meta: this forward's metadata.

        Raises:
            SelectionError: the layer chooses in a pool that has not been published in this forward.
        """
        consumed = None
        if layer.pool_source is not None:
            consumed = meta.selection.consume_pool(layer.pool_source, layer.layer_id)
        chosen, published = self._choose(layer, q, weights, cache, meta, consumed)
        meta.selection.publish_topk(layer.layer_id, chosen)
        if layer.is_candidate_source:
            meta.selection.publish_pool(layer.layer_id, published)
        if self.trace is not None and self.trace.is_live:
            unrestricted = None
            if consumed is not None:
                unrestricted = self._choose(layer, q, weights, cache, meta, None)[0].positions
            self.trace.record(layer, meta, chosen.positions, published, unrestricted)

    def _wants_pool(self, layer: LayerSpec, meta: Csa2Metadata) -> bool:
        """False too where every row's context fits the pool: the step is skipped, the result the same."""
        return layer.is_candidate_source and meta.longest // layer.ratio > self.config.candidate_pool_entries

    def _choose(self, layer, q, weights, cache, meta, consumed: Tensor | None) -> tuple[TopK, Tensor | None]:
        """The Top-K, and the pool to publish or None."""
        raise NotImplementedError

    def in_place(self) -> dict[str, str]:
        """The route (routes.py) of each operation that it does, read off the functions that it calls now."""
        raise NotImplementedError


class TorchIndexer(Indexer):
    """The torch route."""

    def in_place(self) -> dict[str, str]:
        scores = routes.route_of(index_scores)
        return {routes.SCAN: scores, routes.CANDIDATES: scores, routes.TOPK: routes.route_of(select_topk)}

    def _choose(self, layer, q, weights, cache, meta, consumed: Tensor | None) -> tuple[TopK, Tensor | None]:
        device = q.device
        positions = torch.full((meta.num_rows, self.config.index_topk), -1, dtype=torch.int64, device=device)
        published = None
        if self._wants_pool(layer, meta):
            shape = (meta.num_rows, self.config.candidate_topk_blocks)
            published = torch.full(shape, -1, dtype=torch.int64, device=device)
        for tile in self._tiles(layer, meta, consumed is not None):
            rows = tile.rows.flatten()
            visible = meta.ratios[layer.ratio].visible[rows]
            if consumed is not None:
                entries = block_entries(consumed[rows], visible, self.config.candidate_block_size)
                positions[rows] = self._choose_in_pool(layer, q[rows], weights[rows], cache, meta, tile, entries)
                continue
            scores, entry = self._scan(layer, q[tile.rows], weights[tile.rows], cache, meta, tile)
            positions[rows] = select_topk(scores, entry < visible[:, None], self.config.index_topk)
            if published is not None:
                published[rows] = candidate_blocks(
                    scores, visible, self.config.candidate_topk_blocks, self.config.candidate_block_size
                )
        slots = meta.tables.compressed_slots(meta.requests[:, None], positions, layer.ratio)
        return TopK(positions, slots), published

    def _tiles(self, layer: LayerSpec, meta: Csa2Metadata, in_pool: bool) -> Iterator[RowGroup]:
        """The forward's rows as rectangles under the tile budget."""
        if meta.groups is None:
            raise ValueError("the torch route takes metadata with row groups; this was built for fixed shapes")
        for group in meta.groups:
            entries = self.config.candidate_pool_entries if in_pool else group.longest // layer.ratio
            budget = max(1, _TILE_BYTES // (max(entries, 1) * self.config.index_n_heads * 4))
            width = min(budget, group.rows.shape[1])
            yield from group.tiles(height=budget // width, width=width)

    def _scan(self, layer, q, weights, cache, meta, tile: RowGroup) -> tuple[Tensor, Tensor]:
        """Scores bf16 [requests * rows, entries] over a tile's longest context, and the entry ids.

        q [requests, rows, heads, 128]. Scores past a row's visible entries are arbitrary.
        """
        entry = torch.arange(tile.longest // layer.ratio, device=q.device)
        # A request shorter than the tile's longest has stale table entries past its end: not slots of it.
        past_end = entry >= (tile.lengths // layer.ratio)[:, None]
        listed = entry.expand_as(past_end).masked_fill(past_end, -1)
        slots = meta.tables.compressed_slots(tile.requests[:, None], listed, layer.ratio)
        return index_scores(q, weights, gather_index_k(cache, slots)).flatten(0, 1), entry

    def _choose_in_pool(self, layer, q, weights, cache, meta, tile: RowGroup, entries: Tensor) -> Tensor:
        """Top-K among the entries of each row's pool, -1 where absent; q [rows, heads, 128]."""
        requests = tile.requests.repeat_interleave(tile.rows.shape[1])
        slots = meta.tables.compressed_slots(requests[:, None], entries, layer.ratio)
        scores = index_scores(q[:, None], weights[:, None], gather_index_k(cache, slots)).flatten(0, 1)
        columns = select_topk(scores, entries >= 0, self.config.index_topk)
        return entries.gather(1, columns.clamp(min=0)).masked_fill(columns < 0, -1)


def indexer_for(plan: LayerPlan, device_type: str, route: str) -> Indexer:
    """The indexer of a device by the name of its route (routes.py, the index scan's).

    Raises:
        ValueError: no route serves the device, or the route cannot serve the model's config.
    """
    if device_type == "cpu":
        return TorchIndexer(plan)
    if device_type == "cuda" and route == "deep_gemm":
        from sglang_csa2.indexer_deep_gemm import DeepGemmIndexer

        return DeepGemmIndexer(plan)
    if device_type == "cuda":
        from sglang_csa2.indexer_cuda import CudaIndexer

        return CudaIndexer(plan, route)
    raise ValueError(f"csa2 has no indexer for device {device_type!r}; it serves cpu and cuda")
