"""A decode step's kernels captured in one CUDA graph: replays follow what changed on the device since."""

import kernel_cases as cases
import pytest
import torch

from sglang_csa2.kernels import triton_pool_pairs, triton_sparse_attention, triton_store
from sglang_csa2.reference import quantize_index

pytestmark = pytest.mark.skipif(cases.INTERPRETED, reason="captures a graph")

ROWS, CONTEXT, TOPK = 5, 1 << 16, 512


class Step:
    """Store, score, choose, attend at ratio 2, over static buffers."""

    def __init__(self, device, scoring, selecting):
        self.scoring, self.selecting = scoring, selecting
        self.req_to_token, slots = cases.paged_context(ROWS, CONTEXT, device)
        self.index = cases.index_cache(slots // 2, device)
        self.main = cases.main_cache(1 << 14, device).repeat(slots // 2 >> 14, 1)
        self.swa = cases.swa_cache(4096, device)
        self.positions = torch.zeros(ROWS, dtype=torch.int64, device=device)
        self.requests = torch.arange(ROWS, device=device)
        self.out_slots = torch.zeros(ROWS, dtype=torch.int64, device=device)
        self.swa_slots = cases.random_slots(ROWS, 128, 4000, device)
        self.q = torch.randn(ROWS, 16, 512, device=device).bfloat16()
        self.index_q = quantize_index(torch.randn(ROWS, 32, 128)).to(device)
        self.weights = (torch.randn(ROWS, 32, device=device) * 0.02).bfloat16()
        self.kv = torch.randn(ROWS, 1024, device=device)
        self.pending = torch.randn(2 * ROWS, 1024, device=device)
        self.table = cases.rope_table(CONTEXT, device)
        self.norm = torch.ones(512, device=device).bfloat16()
        self.sink = torch.zeros(16, device=device)

    def move(self, positions):
        self.positions.copy_(torch.tensor(positions))
        self.out_slots.copy_(self.req_to_token[self.requests, self.positions])
        self.kv.normal_()

    def __call__(self):
        kv, score = self.kv[:, :512], self.kv[:, 512:]
        latent, entry_slots, entry_positions = triton_pool_pairs.pool_decode(
            kv, score, self.positions, self.requests, self.out_slots, self.pending, 2, self.norm, cases.EPS
        )
        triton_store.main_kv_store(latent, self.table, entry_positions, entry_slots, self.main)
        visible = (self.positions + 1) // 2
        part = (self.index_q, self.weights, self.index, self.req_to_token, self.requests, visible, 2)
        maxima = self.scoring.block_maxima(*part, CONTEXT // 2, skip=TOPK * 8)
        blocks = self.selecting.best_blocks(*maxima, visible, TOPK, keep_newest=False)
        scores, best = self.scoring.index_scores_candidates(*part, blocks, skip=TOPK)
        chosen, slots = self.selecting.select_slots(
            scores, best, blocks, visible, TOPK, self.req_to_token, self.requests, 2
        )
        out = triton_sparse_attention.sparse_attention(
            self.q, self.swa, self.swa_slots, self.main, slots, self.sink, 512**-0.5
        )
        return chosen, slots, out


@pytest.mark.parametrize("forms", [("triton_index_scores", "triton_topk"), ("cuda_index_decode", "cuda_topk")])
def test_replay_follows_the_device(forms, device):
    step = Step(device, *map(cases.module_of, forms))
    step.move([0, 1, 2, 3, 4])
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for positions in ([7, 700, 1023, 1024, 65535], [0, 1, 65534, 30001, 8192]):
        step.move(positions)
        pending, main = step.pending.clone(), step.main.clone()
        graph.replay()
        replayed = [x.clone() for x in captured]
        after_main = step.main.clone()
        step.pending.copy_(pending)
        step.main.copy_(main)
        for have, want in zip(replayed, step(), strict=True):
            assert torch.equal(have, want)
        assert torch.equal(after_main, step.main)
        counts = [min(TOPK, (p + 1) // 2) for p in positions]
        assert (replayed[0] >= 0).sum(1).tolist() == counts
