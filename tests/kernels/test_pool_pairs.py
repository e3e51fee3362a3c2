"""Pooling, its norm and the pending ring against pool_pairs.py."""

import kernel_cases as cases
import pytest
import torch

from sglang_csa2.kernels import pool_pairs as torch_form
from sglang_csa2.kernels import triton_pool_pairs as kernels
from sglang_csa2.kernels.norm_rope import rms_norm

ROWS = cases.pick([1, 2, 3, 127, 128, 257, 513], [1, 6])


def _inputs(rows, ring_rows, device):
    # kv and score as column halves of one product: strided rows.
    both = torch.randn(rows, 1024, device=device) * 3
    weight = (1 + 0.2 * torch.randn(512, device=device)).bfloat16()
    return both[:, :512], both[:, 512:], torch.randn(ring_rows, 1024, device=device) * 3, weight


def _close(latent, pooled, weight):
    want = rms_norm(pooled.bfloat16(), weight, cases.EPS)
    assert (latent != want).float().mean() < 5e-3
    assert cases.relative_error(latent, want) < 1e-3


@pytest.mark.parametrize("rows", ROWS)
def test_pool_pairs(rows, device):
    kv, score, pending, weight = _inputs(rows + 1, 64, device)
    odd = torch.randint(0, rows + 1, (rows,), device=device)
    partner = torch.randint(0, rows + 1, (rows,), device=device)
    partner[torch.rand(rows, device=device) < 0.4] = -1
    reads = torch.randint(0, 64, (rows,), device=device)
    want = torch_form.pool_pairs(kv, score, odd, partner, pending, reads)
    _close(kernels.pool_pairs(kv, score, odd, partner, pending, reads, weight, cases.EPS), want, weight)


def test_no_pairs(device):
    kv, score, pending, weight = _inputs(1, 4, device)
    none = torch.empty(0, dtype=torch.int64, device=device)
    assert kernels.pool_pairs(kv, score, none, none, pending, none, weight, cases.EPS).shape == (0, 512)
    kernels.keep_pending(kv, score, none, pending, none)


def test_keep_pending(device):
    kv, score, pending, _ = _inputs(9, 16, device)
    rows = torch.tensor([8, 0, 3], device=device)
    ring_rows = torch.tensor([5, -1, 15], device=device)
    want = pending.clone()
    torch_form.keep_pending(kv, score, rows[[0, 2]], want, ring_rows[[0, 2]])
    kernels.keep_pending(kv, score, rows, pending, ring_rows)
    assert torch.equal(pending, want)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("ring", [1, 2, 4])
def test_pool_decode(rows, ring, device):
    kv, score, pending, weight = _inputs(rows, 2 * rows * ring, device)
    positions = torch.randint(0, 5000, (rows,), device=device)
    requests = torch.randperm(2 * rows, device=device)[:rows]
    out_slots = torch.randint(0, 1 << 40, (rows,), device=device)
    out_slots[torch.rand(rows, device=device) < 0.2] = -1
    requests[torch.rand(rows, device=device) < 0.2] = -1
    # What padding must not read.
    pending_want = pending.clone()
    latent, slots, entry_positions = kernels.pool_decode(
        kv, score, positions, requests, out_slots, pending, ring, weight, cases.EPS
    )
    live = (requests >= 0) & (out_slots >= 0)
    emits, keeps = live & (positions % 2 == 1), live & (positions % 2 == 0)
    assert torch.equal(slots, torch.where(emits, out_slots // 2, -1))
    assert torch.equal(entry_positions, torch.where(emits, positions - 1, 0))
    assert (latent[~emits] == 0).all()
    ring_rows = requests * ring + (positions - positions % 2) % ring
    odd = emits.nonzero().flatten()
    if len(odd):
        pooled = torch_form.pool_pairs(kv, score, odd, torch.full_like(odd, -1), pending_want, ring_rows[odd])
        _close(latent[odd], pooled, weight)
    kept = keeps.nonzero().flatten()
    torch_form.keep_pending(kv, score, kept, pending_want, ring_rows[kept])
    assert torch.equal(pending, pending_want)
