"""The DeepGEMM indexer against the reference, on the CPU: the library's two functions and the selection in torch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from harness import Bench, Request, expected, relative_error

from sglang_csa2 import envs, indexer_deep_gemm, routes
from sglang_csa2.indexer_deep_gemm import DeepGemmIndexer
from sglang_csa2.kernels import deep_gemm_scores
from sglang_csa2.kernels.index_scores import gather_index_k
from sglang_csa2.kernels.topk import select_topk


class Scores:
    """What the library would answer, on its inputs as our wrapper packs and checks them."""

    def __init__(self):
        self.scans, self.blocks = 0, 0

    def _entries(self, q, weights, cache, pages, visible, entry, blocks=None):
        deep_gemm_scores.check(q, weights, cache, pages, visible, blocks)
        seen = (entry >= 0) & (entry < visible[:, None])
        page = pages.long().gather(1, (entry.clamp(min=0) // 128).clamp(max=pages.shape[1] - 1))
        keys = gather_index_k(cache, (page * 128 + entry.clamp(min=0) % 128).masked_fill(~seen, -1))
        products = torch.einsum("nhd,nkd->nhk", q.float(), keys.float()).relu()
        return (products * weights.float()[..., None]).sum(1), seen

    def scan_scores(self, q, weights, cache, pages, visible, width):
        self.scans += 1
        scores, seen = self._entries(q, weights, cache, pages, visible, torch.arange(width).expand(len(q), -1))
        # Past the visible entries the library leaves what was there.
        return scores.masked_fill(~seen, torch.nan)

    def block_scores(self, q, weights, cache, pages, visible, blocks):
        self.blocks += 1
        entry = (blocks[..., None] * 8 + torch.arange(8)).masked_fill(blocks[..., None] < 0, -1).flatten(1)
        scores, seen = self._entries(q, weights, cache, pages, visible, entry, blocks)
        return scores.masked_fill(~seen, -torch.inf)


def _best_blocks(maxima, tiles, visible, k, *, keep_newest):
    assert torch.equal(tiles, maxima.unflatten(1, (-1, 8)).amax(-1))
    block = torch.arange(maxima.shape[1])
    allowed = block * 8 < visible[:, None]
    if keep_newest:
        maxima = maxima.masked_fill(block == (visible[:, None] - 1) // 8, torch.inf)
    return select_topk(maxima, allowed, k).int()


def _select_slots(scores, maxima, blocks, visible, k, table, requests, ratio):
    entry = (blocks[..., None] * 8 + torch.arange(8)).flatten(1)
    allowed = (blocks >= 0).repeat_interleave(8, 1) & (entry < visible[:, None])
    columns = select_topk(scores, allowed, k)
    positions = entry.gather(1, columns.clamp(min=0)).masked_fill(columns < 0, -1)
    slots = table[requests[:, None], positions.clamp(min=0) * ratio].long() // ratio
    return positions.int(), slots.masked_fill(positions < 0, -1)


SELECTING = SimpleNamespace(best_blocks=_best_blocks, select_slots=_select_slots)


@pytest.mark.parametrize("checked", [False, True], ids=["", "checked"])
@pytest.mark.parametrize("tile_bytes", [1 << 30, 40_000], ids=["one tile", "tiles of rows"])
def test_choices_are_the_references(monkeypatch, tile_bytes, checked):
    monkeypatch.setenv(envs.CHECK, str(int(checked)))
    monkeypatch.setattr(indexer_deep_gemm, "_TILE_BYTES", tile_bytes)
    # The pool's pages are as with the flag; that the CPU has no DeepGEMM is not the question here.
    monkeypatch.setenv(envs.DEEP_GEMM_INDEXER, "1")
    monkeypatch.setattr(routes, "indexer_problem", lambda machine, flags: None)
    monkeypatch.setattr(routes.Flags, "from_env", classmethod(lambda cls, env=None: cls()))
    bench = Bench()
    assert bench.pool.index_cache(2).shape[1] == 128 * 68
    scores = Scores()
    indexer = DeepGemmIndexer(bench.plan, scores)
    indexer._kernels = SELECTING
    if checked:
        # The books hold pages of 128 slots too.
        bench.backend.indexer.inner = indexer
    else:
        bench.backend.indexer = indexer
    request, other = Request.draw(400, seed=1, slot=3), Request.draw(300, seed=2, slot=1)
    bench.forward([(request, 301), (other, 7)])
    bench.forward([(other, 1), (request, 99)])
    for one in (request, other):
        wanted = expected(bench, one, score_dtype=torch.float32)
        for layer_id, out in wanted.outputs.items():
            assert relative_error(bench.output(one, layer_id), out) < 5e-3, f"layer {layer_id}"
    assert scores.scans and scores.blocks
