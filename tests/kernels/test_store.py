"""The stores against records.py and store.py."""

import kernel_cases as cases
import pytest
import torch

from sglang_csa2.kernels import records, store
from sglang_csa2.kernels import triton_store as kernels
from sglang_csa2.kernels.norm_rope import rms_norm
from sglang_csa2.layout import INDEX_PAGE_BYTES, MAIN_KV, SWA_KV

ROWS = cases.pick([1, 2, 127, 128, 129, 513], [1, 5])
POSITIONS = 4096


def _case(rows, dims, device):
    # Rows of a wider buffer: the stride is not the width.
    x = cases.latents(rows, 2 * dims, device)[:, :dims]
    weight = (1 + 0.2 * torch.randn(dims, device=device)).bfloat16()
    positions = torch.randint(0, POSITIONS, (rows,), device=device)
    slots = torch.randperm(2 * rows + 64, device=device)[:rows]
    slots[torch.rand(rows, device=device) < 0.2] = -1
    return x, weight, cases.rope_table(POSITIONS, device), positions, slots


def _junk(shape, device):
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)


def _mismatch(have, want):
    return (have != want).float().mean().item()


@pytest.mark.parametrize("rows", ROWS)
def test_swa_store(rows, device):
    kv, weight, table, positions, slots = _case(rows, 512, device)
    have = _junk((2 * rows + 64, SWA_KV.bytes), device)
    want = have.clone()
    store.swa_store(kv, weight, cases.EPS, table, positions, slots, want)
    kernels.swa_store(kv, weight, cases.EPS, table, positions, slots, have)
    untouched = torch.ones(len(have), dtype=torch.bool, device=device)
    untouched[slots[slots >= 0]] = False
    assert torch.equal(have[untouched], want[untouched])
    # A norm summed in another order moves a bf16 value by one unit now and then.
    assert _mismatch(have, want) < 2e-3
    error = cases.relative_error(
        records.decode_swa_kv(have[~untouched]), records.decode_swa_kv(want[~untouched]).double() + 1e-30
    )
    assert error < 2e-2


@pytest.mark.parametrize("int_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("rows", ROWS)
def test_main_kv_store_bits(rows, int_dtype, device):
    latent, _, table, positions, slots = _case(rows, 512, device)
    have = _junk((2 * rows + 64, MAIN_KV.bytes), device)
    want = have.clone()
    store.main_kv_store(latent, table, positions, slots, want)
    kernels.main_kv_store(latent, table, positions.to(int_dtype), slots.to(int_dtype), have)
    assert torch.equal(have, want)


@pytest.mark.parametrize("rows", ROWS)
def test_main_kv_store_with_norm(rows, device):
    pooled, weight, table, positions, slots = _case(rows, 512, device)
    have = _junk((2 * rows + 64, MAIN_KV.bytes), device)
    want = have.clone()
    normed = torch.full((rows, 512), torch.nan, dtype=torch.bfloat16, device=device)
    kernels.main_kv_store(pooled, table, positions, slots, have, weight=weight, eps=cases.EPS, normed=normed)
    expected = rms_norm(pooled, weight, cases.EPS)
    assert _mismatch(normed, expected) < 2e-3
    # From the rows as they came out, the bytes are exact.
    store.main_kv_store(normed, table, positions, slots, want)
    assert torch.equal(have, want)


@pytest.mark.parametrize("rows", ROWS)
def test_index_k_store(rows, device):
    key, weight, table, positions, slots = _case(rows, 128, device)
    pages = (2 * rows + 64 + 63) // 64
    have = _junk((pages, INDEX_PAGE_BYTES), device)
    want = have.clone()
    store.index_k_store(key, weight, cases.EPS, table, positions, slots, want)
    kernels.index_k_store(key, weight, cases.EPS, table, positions, slots, have)
    assert _mismatch(have, want) < 2e-3


@pytest.mark.parametrize("magnitude", [1e-8, 1e-3, 1.0, 300.0])
def test_quantizers_are_exact(magnitude, device):
    """Unit rows make RMSNorm exact enough to be skipped: +-1 entries have rms 1, and the weight sets the values."""
    rows = 4
    signs = torch.randint(0, 2, (rows, 512), device=device).mul(2).sub(1).bfloat16()
    weight = (torch.randn(512, device=device) * magnitude).bfloat16()
    table = cases.rope_table(8, device)
    positions = torch.zeros(rows, dtype=torch.int64, device=device)
    slots = torch.arange(rows, device=device)
    value = (signs.float() * weight.float()).bfloat16()
    have = _junk((rows, SWA_KV.bytes), device)
    kernels.swa_store(signs, weight, 0.0, table, positions, slots, have)
    assert torch.equal(have, records.encode_swa_kv(value))
    have = _junk((rows, MAIN_KV.bytes), device)
    kernels.main_kv_store(value, table, positions, slots, have)
    assert torch.equal(have, records.encode_main_kv(value))
    have = _junk((1, INDEX_PAGE_BYTES), device)
    kernels.index_k_store(signs[:, :128], weight[:128].contiguous(), 0.0, table, positions, slots, have)
    data, scales = store.index_page_views(have)
    want = records.encode_index_k(value[:, :128])
    assert torch.equal(torch.cat([data[0, :rows], scales[0, :rows]], -1), want)


@pytest.mark.skipif(cases.INTERPRETED, reason="allocates 2 GiB")
def test_stores_past_two_gib(device):
    """The last slots of caches whose bytes do not fit 31 bits."""
    for kernel, torch_form, dims, record_bytes in (
        (kernels.swa_store, store.swa_store, 512, SWA_KV.bytes),
        (kernels.index_k_store, store.index_k_store, 128, INDEX_PAGE_BYTES),
    ):
        x, weight, table, positions, slots = _case(3, dims, device)
        cache = torch.empty(2**31 // record_bytes + 64, record_bytes, dtype=torch.uint8, device=device)
        per_row = 64 if dims == 128 else 1
        slots = torch.tensor([len(cache) * per_row - 1, 5, len(cache) * per_row - 70], device=device)
        kernel(x, weight, cases.EPS, table, positions, slots, cache)
        have = cache[[0, 5, len(cache) - 1]].clone() if dims == 128 else cache[slots].clone()
        torch_form(x, weight, cases.EPS, table, positions, slots, cache)
        want = cache[[0, 5, len(cache) - 1]] if dims == 128 else cache[slots]
        assert _mismatch(have, want) < 2e-3


def test_refusals(device):
    kv, weight, table, positions, slots = _case(2, 512, device)
    cache = _junk((70, SWA_KV.bytes), device)
    with pytest.raises(ValueError, match="bfloat16"):
        kernels.swa_store(kv.float(), weight, 0.0, table, positions, slots, cache)
    with pytest.raises(ValueError, match="shape"):
        kernels.swa_store(kv, weight, 0.0, table, positions[:1], slots, cache)
    with pytest.raises(ValueError, match="go together"):
        kernels.main_kv_store(kv, table, positions, slots, cache[:, : MAIN_KV.bytes].contiguous(), weight=weight)
