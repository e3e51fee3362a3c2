"""What an index source publishes for the layers after it, for one forward.

A source layer *publishes* the Top-K of every row; the candidate source also publishes a pool of blocks per row.
Consumers read them by source layer. A `Selection` is made anew with each forward's metadata, so nothing chosen
in one forward can be read in the next: a consumer whose source has not run in this forward is an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class TopK:
    """One source layer's choice.

    positions: int64 [rows, topk] compressed positions, ascending, -1 padded. Written by the indexer.
    slots: int64 [rows, topk] the same entries' slots in the kv_source's cache, -1 padded. Written by the indexer.
    """

    positions: Tensor
    slots: Tensor


class SelectionError(RuntimeError):
    """A consumer ran before its source in this forward."""


@dataclass
class Selection:
    """Choices published in this forward, by source layer id."""

    topk: dict[int, TopK] = field(default_factory=dict)
    # int64 [rows, topk_blocks] block ids, ascending, -1 padded; None where every row's whole context fits the
    # pool, so that consumers may scan all that is visible with the same result.
    pools: dict[int, Tensor | None] = field(default_factory=dict)

    def publish_topk(self, source: int, topk: TopK) -> None:
        self.topk[source] = topk

    def publish_pool(self, source: int, blocks: Tensor | None) -> None:
        self.pools[source] = blocks

    def consume_topk(self, source: int, layer_id: int) -> TopK:
        return self._consume(self.topk, source, layer_id, "Top-K")

    def consume_pool(self, source: int, layer_id: int) -> Tensor | None:
        return self._consume(self.pools, source, layer_id, "candidate pool")

    @staticmethod
    def _consume(published: dict, source: int, layer_id: int, what: str):
        if source not in published:
            raise SelectionError(
                f"layer {layer_id} reads the {what} of layer {source}, which has published none in this forward; "
                "layers must run in order and a source must run its indexer"
            )
        return published[source]
