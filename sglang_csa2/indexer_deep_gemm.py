"""Score -> candidate pool -> Top-K -> slots with DeepGEMM's scores, on SM100. The contract is `Indexer.choose`'s.

A Full layer's scan has a score for every entry; their maxima per block lead to the row's best blocks, as in the triton
route. From there on both end alike: a consumer scores the blocks of its pool with the library's sparse kernel, a Full
layer takes those of its best blocks from the scan. Selection is csa2's own.

Rows are worked off in tiles under a budget, because a scan here is as wide as the context. Not run on hardware
(kernels/deep_gemm_scores.py); tests hold it to the torch route with the library's two functions played in torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_csa2 import routes
from sglang_csa2.indexer_cuda import CudaIndexer
from sglang_csa2.kernels import deep_gemm_scores as scoring
from sglang_csa2.kernels.triton_index_scores import BLOCK_ENTRIES, TILE_ENTRIES
from sglang_csa2.layer_plan import LayerPlan
from sglang_csa2.metadata import Csa2Metadata
from sglang_csa2.selection import TopK

_TILE_BYTES = 1 << 30
# A scan's width is a multiple of the entries of a page and of the tiles whose maxima selection reads.
_WIDTH = 128


class DeepGemmIndexer(CudaIndexer):
    """The DeepGEMM route."""

    def __init__(self, plan: LayerPlan, scores: Any = scoring):
        super().__init__(plan)
        self.scores = scores

    def in_place(self) -> dict[str, str]:
        scores = routes.route_of(self.scores)
        return super().in_place() | {routes.SCAN: scores, routes.CANDIDATES: scores}

    def _choose(self, layer, q, weights, cache, meta, consumed: Tensor | None) -> tuple[TopK, Tensor | None]:
        publishes = self._wants_pool(layer, meta) or (meta.groups is None and layer.is_candidate_source)
        entries = -(-max(meta.longest // layer.ratio, 1) // _WIDTH) * _WIDTH
        height = max(1, _TILE_BYTES // (4 * entries))
        chosen, pools = [], []
        for top in range(0, meta.num_rows, height):
            rows = slice(top, min(top + height, meta.num_rows))
            visible = meta.ratios[layer.ratio].visible[rows]
            pages = self._page_table(meta, rows, layer.ratio, entries)
            part = q[rows], weights[rows].contiguous(), cache, pages, visible
            if consumed is not None:
                blocks, pool = consumed[rows].int(), None
                scores = self.scores.block_scores(*part, blocks)
            else:
                blocks, pool, scores = self._best_blocks_of_scan(part, visible, entries, publishes)
            maxima = scores.unflatten(1, (-1, BLOCK_ENTRIES)).amax(-1)
            place = self.config.index_topk, meta.tables.req_to_token, meta.requests[rows], layer.ratio
            chosen.append(self._kernels.select_slots(scores, maxima, blocks, visible, *place))
            pools.append(pool)
        topk = TopK(*(torch.cat(parts) for parts in zip(*chosen, strict=True)))
        return topk, torch.cat(pools) if publishes else None

    def _best_blocks_of_scan(self, part, visible: Tensor, entries: int, publishes: bool):
        """Blocks that hold the rows' Top-K, the pool or None, and the blocks' scores fp32 [rows, b * 8]."""
        scores = self.scores.scan_scores(*part, entries)
        unseen = torch.arange(entries, device=scores.device) >= visible[:, None]
        scores = scores[:, :entries].masked_fill(unseen, -torch.inf).unflatten(1, (-1, BLOCK_ENTRIES))
        maxima = scores.amax(-1)
        levels = maxima, maxima.unflatten(1, (-1, TILE_ENTRIES // BLOCK_ENTRIES)).amax(-1)
        number, pool = self.config.candidate_topk_blocks, None
        if publishes:
            pool = self._kernels.best_blocks(*levels, visible, number, keep_newest=True)
        # One place of the pool is the newest block's.
        blocks = pool
        if blocks is None or number <= self.config.index_topk:
            blocks = self._kernels.best_blocks(*levels, visible, self.config.index_topk, keep_newest=False)
        listed = scores.gather(1, blocks.clamp(min=0).long()[..., None].expand(-1, -1, BLOCK_ENTRIES))
        return blocks, pool, listed.masked_fill(blocks[..., None] < 0, -torch.inf).flatten(1)

    @staticmethod
    def _page_table(meta: Csa2Metadata, rows: slice, ratio: int, entries: int) -> Tensor:
        """int32 [rows, pages] index-K page of every 128 entries; 0 where the request has none."""
        first = torch.arange(0, entries, scoring.PAGE_SLOTS, device=meta.positions.device)
        table = meta.tables.req_to_token
        tokens = (first * ratio).clamp(max=table.shape[1] - 1)
        slots = table[meta.requests[rows][:, None], tokens].long() // ratio
        absent = first >= meta.ratios[ratio].visible[rows][:, None]
        return (slots // scoring.PAGE_SLOTS).masked_fill(absent, 0).int().contiguous()
