"""Prefill through a bf16 workspace: what a large chunk may attend to is gathered once, then listed by index.

    kv       bf16 [window positions | main KV entries, 512], request after request in each part
    windows  int32 [rows, W]      each row's window in the first part
    merged   int32 [rows, W + K]  the window, then the chosen entries in the second part

W and K are the window and Top-K, the tables rounded up to what the library's kernel takes, -1 padded. Window KV
is every layer's own and gathered by each. Main KV is its kv_source's: gathered by the first layer that reads it, kept
for the others, as is the merged table for the layers of one index_source, unless reuse is off.

A workspace belongs to one forward's metadata; layers run in order, so what is kept is what the layer before left.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sglang_csa2.layer_plan import LayerSpec
from sglang_csa2.metadata import Csa2Metadata, to_device
from sglang_csa2.ops import Ops
from sglang_csa2.selection import TopK

# Rows from which the gather pays: below it the packed records are read directly.
LEAST_ROWS = 256
# Bytes of a workspace: a chunk of one request at 1M tokens of context takes half of it.
MOST_BYTES = 2 << 30
_KEY_BYTES = 1024


class _Part(NamedTuple):
    """One part of the workspace, request after request.

    requests, places: int64 [n] request slot, and position or entry, of each key. base: int64 [rows] where the part's
    keys of a row's request begin, less the first one's place: a key's index is its place plus this.
    """

    requests: Tensor
    places: Tensor
    base: Tensor


class _Main(NamedTuple):
    """Main KV of one ratio: slots int64 [n] to gather, `_Part.base`, lengths int32 [rows] to look at in `merged`."""

    slots: Tensor
    base: Tensor
    lengths: Tensor


class Workspace:
    """See the module.

    kept_source: kv_source whose main KV `kv` holds; kept_choice: index_source whose choice `merged` lists. Both are
    written by `attend`.
    """

    def __init__(self, ops: Ops, meta: Csa2Metadata, topk: int, *, reuse: bool):
        self.ops, self.meta, self.topk, self.reuse = ops, meta, topk, reuse
        self.kept_source: int | None = None
        self.kept_choice: int | None = None
        self.window = meta.swa_slots.shape[1]
        layout, tables = meta.layout, meta.tables
        part = self._part(layout.seq_lens, (layout.first_positions - self.window + 1).clamp(min=0))
        self.swa_slots = tables.full_to_swa[tables.full_slots(part.requests, part.places)].long()
        # A row's window lies side by side, so its n-th key is n after its first.
        first = (meta.window_first + part.base)[:, None]
        listed = first + torch.arange(self.window, device=first.device)
        self.windows = self._table(self.window)
        self.windows[:, : self.window] = listed.masked_fill(meta.swa_slots < 0, -1)
        self.merged = self._table(self.window + topk)
        self.merged[:, : self.window] = self.windows[:, : self.window]
        self.mains = {ratio: self._main(ratio) for ratio in meta.ratios}
        keys = len(self.swa_slots) + max(len(main.slots) for main in self.mains.values())
        self.kv = torch.empty(keys, 512, dtype=torch.bfloat16, device=first.device)

    @staticmethod
    def serves(ops: Ops, meta: Csa2Metadata) -> bool:
        """Whether a forward's rows are many enough for the gather to pay, and its context fits."""
        if ops.sparse_prefill is None or meta.layout is None or meta.num_rows < LEAST_ROWS:
            return False
        layout, window = meta.layout, meta.swa_slots.shape[1]
        entries = int(layout.seq_lens[layout.counts > 0].sum()) // min(meta.ratios)
        return (entries + meta.num_rows + window * len(layout.counts)) * _KEY_BYTES <= MOST_BYTES

    def attend(
        self,
        layer: LayerSpec,
        q: Tensor,
        swa_cache: Tensor,
        main_cache: Tensor | None,
        topk: TopK | None,
        attn_sink: Tensor,
        scale: float,
    ) -> Tensor:
        """One layer's attention; see `attention.attend`. topk: what its index source published, or None."""
        begin = len(self.swa_slots)
        self.ops.gather_swa_kv(swa_cache, self.swa_slots, self.kv[:begin])
        if topk is None:
            return self.ops.sparse_prefill(q, self.kv[:begin], self.windows, None, attn_sink, scale)
        slots, base, lengths = self.mains[layer.ratio]
        end = begin + len(slots)
        if not (self.reuse and self.kept_source == layer.kv_source):
            self.ops.gather_main_kv(main_cache, slots, self.kv[begin:end])
            self.kept_source = layer.kv_source
        if not (self.reuse and self.kept_choice == layer.index_source):
            listed = topk.positions + (base + begin)[:, None]
            chosen = self.merged[:, self.window : self.window + self.topk]
            chosen.copy_(listed.masked_fill(topk.positions < 0, -1))
            self.kept_choice = layer.index_source
        return self.ops.sparse_prefill(q, self.kv[:end], self.merged, lengths, attn_sink, scale)

    def _main(self, ratio: int) -> _Main:
        """Every entry of the batch's requests."""
        entries = self.meta.layout.seq_lens // ratio
        part = self._part(entries, torch.zeros_like(entries))
        slots = self.meta.tables.compressed_slots(part.requests, part.places, ratio)
        # A row's chosen entries come first in their columns: what is past them need not be looked at.
        lengths = self.meta.ratios[ratio].visible.clamp(max=self.topk) + self.window
        return _Main(slots, part.base, lengths.int())

    def _part(self, ends: Tensor, firsts: Tensor) -> _Part:
        """Places `firsts` to `ends` of each request that has rows; int64 [batch] on the host both."""
        layout, device = self.meta.layout, self.meta.positions.device
        sizes = (ends - firsts) * (layout.counts > 0)
        total, before = int(sizes.sum()), sizes.cumsum(0) - sizes - firsts
        sizes, before, counts = to_device(device, torch.stack([sizes, before, layout.counts]))
        batch = torch.arange(len(sizes), device=device)
        member = torch.repeat_interleave(batch, sizes, output_size=total)
        row_member = torch.repeat_interleave(batch, counts, output_size=self.meta.num_rows)
        places = torch.arange(total, device=device) - before[member]
        return _Part(self.meta.request_slots[member], places, before[row_member])

    def _table(self, columns: int) -> Tensor:
        multiple = self.ops.index_multiple
        shape = (self.meta.num_rows, -(-columns // multiple) * multiple)
        return torch.full(shape, -1, dtype=torch.int32, device=self.meta.positions.device)
