"""Pool invariants, checked in every forward when SGLANG_CSA2_CHECK=1; nothing of this runs otherwise.

- The rows of a forward are those of the host's batch, with their positions, requests and slots.
- A slot that attention or a pair reads holds what was written there since it was allocated, by the request or the
  prefix that reads it; so has every index key that a row sees. (Which keys a kernel fetches is for its own tests. A
  prefix is as the host puts it together from pages; a page that it has freed and nobody has written is that page.)
- A layer attends to its own window, whole, and to the main KV of its kv_source, by the choice of its index_source.
- Only Full layers write compressed caches. A pair is closed with its own even token.
- A selection does not outlive its forward. It is ascending, unique, inside what its row sees and inside its pool, and
  as long as these allow; a pool is as long as it can be, holds its row's newest block, and is there where needed.

`ledger` keeps the books. Graph replays run no Python: on a GPU disable them. Under checks a prefill reads packed
records and not a workspace, so that every read is asked about.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_csa2 import routes
from sglang_csa2.ledger import CheckError, Ledger
from sglang_csa2.metadata import Csa2Metadata, DecodeRatioRows, RatioRows

# The route of a prefill whose reads can be asked about.
_PACKED = "packed records"


def install(backend: Any) -> None:
    """Put the checks around a backend's and its pool's operations."""
    ledger = Ledger(backend)
    ops = CheckedOps(backend.ops, ledger)
    if backend.ops.sparse_prefill is not None:
        packed = next(route for route in routes.ROUTES if (route.op, route.name) == (routes.PREFILL, _PACKED))
        backend.routes = backend.routes | {routes.PREFILL: routes.Choice(packed, "SGLANG_CSA2_CHECK=1")}
    backend.ops = backend.token_to_kv_pool._ops = ops
    backend.indexer = CheckedIndexer(backend.indexer, ledger)
    build, sources, forward = backend.init_forward_metadata, backend.forward_low_ratio_sources, backend.forward

    def init_forward_metadata(forward_batch: Any) -> None:
        build(forward_batch)
        if backend.forward_metadata is not None:
            ledger.begin(backend.forward_metadata, forward_batch)
        if (tail := backend.tail_forward_metadata) is not None:
            ledger.begin_tail(backend.forward_metadata, tail.metadata, tail.late_layer_tail.token_indices)

    def forward_low_ratio_sources(**kwargs: Any) -> None:
        ops.layer = backend.plan[kwargs["layer"].layer_id]
        sources(**kwargs)

    def checked_forward(*args: Any, **kwargs: Any) -> Tensor:
        layer = kwargs["layer"] if "layer" in kwargs else args[3]
        ops.layer = backend.plan[layer.layer_id]
        return forward(*args, **kwargs)

    def init_forward_metadata_in_graph(forward_batch: Any) -> None:
        raise CheckError("SGLANG_CSA2_CHECK=1 cannot see into a CUDA graph; start with --disable-cuda-graph")

    requests = backend.req_to_token_pool
    free_rows = requests.free_rows

    def freed(indices: list[int]) -> None:
        ledger.forget(indices)
        free_rows(indices)

    requests.free_rows = freed
    backend.init_forward_metadata = init_forward_metadata
    backend.init_forward_metadata_in_graph = init_forward_metadata_in_graph
    backend.forward_low_ratio_sources = forward_low_ratio_sources
    backend.forward = checked_forward


class CheckedOps:
    """A route with stamps on its stores and questions before its reads.

    layer: the plan of the layer whose sources or attention run, written by `install`'s.
    """

    sparse_prefill = None

    def __init__(self, inner: Any, ledger: Ledger):
        self.inner, self.ledger, self.name = inner, ledger, inner.name
        self.layer: Any = None

    def in_place(self) -> dict[str, str]:
        found = self.inner.in_place()
        return found if self.inner.sparse_prefill is None else found | {routes.PREFILL: _PACKED}

    @property
    def meta(self) -> Csa2Metadata:
        return self.ledger.backend.forward_metadata

    def swa_store(self, kv, norm, table, positions, slots, cache) -> None:
        self.inner.swa_store(kv, norm, table, positions, slots, cache)
        self.ledger.stamp(cache, slots, self.ledger.rows(self.meta)[: slots.shape[0]])

    def main_kv_store(self, kv, score, rows, pending, norm, table, cache):
        ledger, meta = self.ledger, self.meta
        self._writes(cache, "main KV")
        if pending is not None:
            ledger.read(pending, *self._waiting(rows))
        entries = self.inner.main_kv_store(kv, score, rows, pending, norm, table, cache)
        if pending is not None:
            ledger.stamp(pending, *self._left_waiting(rows))
        ledger.stamp(cache, entries.slots, self._entry_serials(rows, entries, meta))
        return entries

    def _waiting(self, rows: RatioRows | DecodeRatioRows) -> tuple[Tensor, Tensor]:
        """Ring rows that the rows say are read, -1 elsewhere, and the serials of the even tokens that belong there."""
        expected, meta = self.ledger.expected, self.meta
        if isinstance(rows, DecodeRatioRows):
            ring, first, live = _ring(rows)
            return ring.masked_fill(~live | (rows.positions % 2 == 0), -1), expected[meta.requests, first]
        requests, partners = meta.requests[rows.entry_rows], rows.partner_rows
        inside = partners >= 0
        for mine, what in ((meta.requests, requests), (meta.positions, rows.entry_positions)):
            if (mine[partners.clamp(min=0)] != what)[inside].any():
                raise CheckError("a pair is closed with a row that is not its even token")
        return rows.pending_reads.masked_fill(inside, -1), expected[requests, rows.entry_positions]

    def _left_waiting(self, rows: RatioRows | DecodeRatioRows) -> tuple[Tensor, Tensor]:
        """Ring rows that the rows say are written, -1 elsewhere, and the serials of the tokens left there."""
        serials = self.ledger.rows(self.meta)
        if isinstance(rows, DecodeRatioRows):
            ring, _, live = _ring(rows)
            return ring.masked_fill(~live | (rows.positions % 2 == 1), -1), serials
        return rows.pending_writes, serials[rows.pending_rows]

    def _entry_serials(self, rows, entries, meta: Csa2Metadata) -> Tensor:
        of = meta.requests if not hasattr(rows, "entry_rows") else meta.requests[rows.entry_rows]
        return self.ledger.expected[of, entries.positions.clamp(min=0)]

    def _writes(self, cache: Tensor, kind: str) -> None:
        """A Full layer writes its own caches, no other layer any."""
        if not self.layer.writes_cache:
            raise CheckError(f"layer {self.layer.layer_id} is a {self.layer.role.value} layer and writes {kind}")
        self.ledger.same(cache, kind, self.layer.layer_id, self.layer.layer_id, "writes")

    def index_k_store(self, key, norm, table, entries, cache) -> None:
        self._writes(cache, "index K")
        self.inner.index_k_store(key, norm, table, entries, cache)
        rows = self.meta.ratios[self.layer.ratio]
        self.ledger.stamp(cache, entries.slots, self._entry_serials(rows, entries, self.meta))

    def lists(self, meta: Csa2Metadata, ratio: int, topk: int) -> Any:
        return self.inner.lists(meta, ratio, topk)

    def sparse_attention(self, q, swa_cache, swa_slots, main_cache, main_slots, attn_sink, scale, lists=None) -> Tensor:
        self._check_window(swa_cache, swa_slots, lists)
        self._check_main(main_cache, main_slots, lists)
        return self.inner.sparse_attention(q, swa_cache, swa_slots, main_cache, main_slots, attn_sink, scale, lists)

    def _check_window(self, cache: Tensor, slots: Tensor, lists: Any) -> None:
        ledger, meta, layer = self.ledger, self.meta, self.layer
        ledger.same(cache, "window KV", layer.layer_id, layer.layer_id)
        at = meta.window_first[:, None] + torch.arange(slots.shape[1], device=slots.device)
        listed = at <= meta.positions[:, None]
        if not torch.equal(slots >= 0, listed):
            raise CheckError(f"layer {layer.layer_id} does not attend to the whole window of every row")
        places = at.clamp(max=ledger.expected_window.shape[1] - 1)
        ledger.read(cache, slots, ledger.expected_window[meta.requests[:, None], places])
        if lists is not None and (lists.swa_lengths < listed.sum(-1)).any():
            raise CheckError(f"layer {layer.layer_id} looks at fewer window slots than are listed")

    def _check_main(self, cache: Tensor | None, slots: Tensor | None, lists: Any) -> None:
        ledger, meta, layer = self.ledger, self.meta, self.layer
        if layer.index_source is None:
            if slots is not None:
                raise CheckError(f"layer {layer.layer_id} attends to its window alone and was given main KV")
            return
        cache = ledger.same(cache, "main KV", layer.kv_source, layer.layer_id)
        topk = meta.selection.topk.get(layer.index_source)
        if topk is None or topk.slots is not slots:
            raise CheckError(
                f"layer {layer.layer_id} attends by a selection that layer {layer.index_source}, its index source, has "
                "not published in this forward"
            )
        first = topk.positions.long().clamp(min=0) * layer.ratio
        ledger.read(cache, slots, ledger.expected[meta.requests[:, None], first])
        if lists is not None and (lists.main_lengths < (slots >= 0).sum(-1)).any():
            raise CheckError(f"layer {layer.layer_id} looks at fewer chosen slots than are listed")


def _ring(rows: DecodeRatioRows) -> tuple[Tensor, Tensor, Tensor]:
    """Ring row of each decode row's pair, position of the pair's first token, and which rows are not padding."""
    first = (rows.positions - rows.positions % 2).clamp(min=0)
    return rows.requests * rows.ring + first % rows.ring, first, (rows.requests >= 0) & (rows.out_slots >= 0)


class CheckedIndexer:
    """An indexer whose reads and choices are checked."""

    def __init__(self, inner: Any, ledger: Ledger):
        self.inner, self.ledger = inner, ledger

    def choose(self, layer, q, weights, cache, meta: Csa2Metadata) -> None:
        visible, config = meta.ratios[layer.ratio].visible, self.inner.config
        self.ledger.same(cache, "index K", layer.kv_source, layer.layer_id)
        self._scan(layer, cache, meta, visible)
        self.inner.choose(layer, q, weights, cache, meta)
        topk = meta.selection.topk[layer.layer_id]
        positions, what = topk.positions.long(), f"the selection of layer {layer.layer_id}"
        _ascending(positions, what)
        if (positions >= visible[:, None]).any():
            raise CheckError(f"{what} holds an entry that its row does not see")
        if not torch.equal(
            topk.slots.long(), meta.tables.compressed_slots(meta.requests[:, None], positions, layer.ratio)
        ):
            raise CheckError(f"{what} has slots that are not its entries'")
        if layer.is_candidate_source:
            self._check_pool(layer, meta.selection.pools[layer.layer_id], visible)
        pool = meta.selection.pools.get(layer.pool_source) if layer.pool_source is not None else None
        eligible = visible
        if pool is not None:
            self._check_inside(pool, positions, what, layer)
            sizes = (visible[:, None] - pool.long() * config.candidate_block_size).clamp(0, config.candidate_block_size)
            eligible = sizes.masked_fill(pool < 0, 0).sum(-1)
        _complete(positions, eligible.clamp(max=config.index_topk), what)

    def _check_pool(self, layer, pool: Tensor | None, visible: Tensor) -> None:
        config, what = self.inner.config, f"the candidate pool of layer {layer.layer_id}"
        if pool is None:
            if (visible > config.candidate_pool_entries).any():
                raise CheckError(f"{what} was not published, and a row sees more entries than it holds")
            return
        _ascending(pool.long(), what)
        newest = torch.where(visible > 0, (visible - 1) // config.candidate_block_size, -1)
        if (pool.amax(-1) != newest).any():
            raise CheckError(f"{what} does not end with its row's newest block")
        _complete(pool, (newest + 1).clamp(max=config.candidate_topk_blocks), what)

    def _check_inside(self, pool: Tensor, positions: Tensor, what: str, layer) -> None:
        blocks = positions // self.inner.config.candidate_block_size
        # Ascending to the end, so that each row can be searched.
        sought = pool.long().masked_fill(pool < 0, 1 << 62)
        place = torch.searchsorted(sought, blocks.contiguous()).clamp(max=sought.shape[1] - 1)
        inside = sought.gather(1, place) == blocks
        if ((positions >= 0) & ~inside).any():
            raise CheckError(f"{what} leaves the candidate pool of layer {layer.pool_source}")

    def _scan(self, layer, cache: Tensor, meta: Csa2Metadata, visible: Tensor) -> None:
        """Every entry that a request's last row sees has its key."""
        last = torch.ones_like(meta.positions, dtype=torch.bool)
        last[:-1] = meta.requests[1:] != meta.requests[:-1]
        for request, count in zip(meta.requests[last].tolist(), visible[last].tolist(), strict=True):
            entries = torch.arange(count, device=cache.device)[None]
            slots = meta.tables.compressed_slots(torch.tensor([[request]], device=cache.device), entries, layer.ratio)
            self.ledger.read(cache, slots, self.ledger.expected[request, entries * layer.ratio])


def _complete(choice: Tensor, wanted: Tensor, what: str) -> None:
    """Rows hold as many places as there are to hold."""
    counts = (choice >= 0).sum(-1)
    if (wrong := counts != wanted).any():
        row = int(wrong.nonzero()[0])
        raise CheckError(
            f"{what} holds {int(counts[row])} in row {row}, where there are {int(wanted[row])} to choose; "
            "scores of NaN are never chosen"
        )


def _ascending(choice: Tensor, what: str) -> None:
    """Rows ascend strictly and are padded with -1 at the end."""
    left, right = choice[:, :-1], choice[:, 1:]
    if not (((right > left) & (left >= 0)) | (right == -1)).all() or (choice < -1).any():
        raise CheckError(f"{what} is not ascending, unique and padded with -1 at its end")
