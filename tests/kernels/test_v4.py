"""The stores into V4 records and the gather out of them, against the torch forms, with junk around every slot."""

import kernel_cases as cases
import pytest
import torch

from sglang_csa2.kernels import records_v4, store, triton_gather_v4, triton_store_v4
from sglang_csa2.kernels.norm_rope import rms_norm
from sglang_csa2.layout import V4

ROWS = cases.pick([1, 2, 127, 513], [1, 5])
POSITIONS = 4096


def v4_cache(slots, page_slots, device):
    """uint8 [pages, page_slots, 584] of junk, and the whole buffer."""
    stride = V4.page_bytes(V4.main, page_slots)
    buffer = torch.randint(0, 256, (-(-slots // page_slots), stride), dtype=torch.uint8, device=device)
    return records_v4.pages_of(buffer, page_slots), buffer


def _case(rows, device):
    x = cases.latents(rows, 1024, device)[:, :512]
    weight = (1 + 0.2 * torch.randn(512, device=device)).bfloat16()
    positions = torch.randint(0, POSITIONS, (rows,), device=device)
    slots = torch.randperm(2 * rows + 64, device=device)[:rows]
    slots[torch.rand(rows, device=device) < 0.2] = -1
    return x, weight, cases.rope_table(POSITIONS, device), positions, slots


def _clone(cache, buffer):
    whole = buffer.clone()
    return records_v4.pages_of(whole, cache.shape[1]), whole


@pytest.mark.parametrize("page_slots", [256, 128])
@pytest.mark.parametrize("rows", ROWS)
def test_main_kv_store_bits(rows, page_slots, device):
    latent, _, table, positions, slots = _case(rows, device)
    have, have_bytes = v4_cache(2 * rows + 64, page_slots, device)
    want, want_bytes = _clone(have, have_bytes)
    store.main_kv_store_v4(latent, table, positions, slots, want)
    triton_store_v4.main_kv_store_v4(latent, table, positions.int(), slots.int(), have)
    assert torch.equal(have_bytes, want_bytes)


@pytest.mark.parametrize("rows", ROWS)
def test_main_kv_store_with_norm(rows, device):
    pooled, weight, table, positions, slots = _case(rows, device)
    have, have_bytes = v4_cache(2 * rows + 64, 256, device)
    want, want_bytes = _clone(have, have_bytes)
    normed = torch.full((rows, 512), torch.nan, dtype=torch.bfloat16, device=device)
    norm = {"weight": weight, "eps": cases.EPS, "normed": normed}
    triton_store_v4.main_kv_store_v4(pooled, table, positions, slots, have, **norm)
    assert (normed != rms_norm(pooled, weight, cases.EPS)).float().mean() < 2e-3
    store.main_kv_store_v4(normed, table, positions, slots, want)
    assert torch.equal(have_bytes, want_bytes)


@pytest.mark.parametrize("rows", ROWS)
def test_swa_store(rows, device):
    kv, weight, table, positions, slots = _case(rows, device)
    kv[:, ::7] = torch.where(torch.rand(rows, 74, device=device) < 0.5, 0.0, -0.0).bfloat16()
    have, have_bytes = v4_cache(2 * rows + 64, 256, device)
    want, want_bytes = _clone(have, have_bytes)
    store.swa_store_v4(kv, weight, cases.EPS, table, positions, slots, want)
    triton_store_v4.swa_store_v4(kv, weight, cases.EPS, table, positions, slots, have)
    # A norm summed in another order moves a bf16 value by one unit now and then.
    assert (have_bytes != want_bytes).float().mean() < 2e-3
    live = slots[slots >= 0]
    want_keys = records_v4.read_v4(want, live).double()
    have_keys = records_v4.read_v4(have, live).double()
    assert cases.relative_error(have_keys, want_keys + 1e-30) < 2e-2
    # Zeros keep their sign, as the model's do; rotated dims may change theirs with the norm.
    assert torch.equal(have_keys[:, :448].signbit(), want_keys[:, :448].signbit())


@pytest.mark.parametrize("page_slots", [256, 128])
@pytest.mark.parametrize("count", cases.pick([1, 7, 8, 9, 513], [1, 9]))
def test_gather(count, page_slots, device):
    cache, _ = v4_cache(600, page_slots, device)
    written = torch.arange(600, device=device)
    records_v4.write_v4(cache, written, records_v4.encode_v4(cases.latents(600, 512, device)))
    slots = torch.randint(0, 600, (count,), device=device)
    slots[torch.rand(count, device=device) < 0.3] = -1
    out = torch.full((count, 512), torch.nan, dtype=torch.bfloat16, device=device)
    assert triton_gather_v4.gather_v4(cache, slots.int(), out) is out
    want = records_v4.read_v4(cache, slots.clamp(min=0)).masked_fill(slots[:, None] < 0, 0)
    assert torch.equal(out.view(torch.int16), want.view(torch.int16))


def test_every_e4m3_byte(device):
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    codes = codes[(codes & 0x7F) != 0x7F]
    records = torch.zeros(len(codes), 584, dtype=torch.uint8, device=device)
    records[:, :448], slots = codes[:, None], torch.arange(len(codes), device=device)
    for scale in (90, 127, 140):
        records[:, 576:583] = scale
        cache, _ = v4_cache(256, 256, device)
        records_v4.write_v4(cache, slots, records)
        have, want = triton_gather_v4.gather_v4(cache, slots), records_v4.decode_v4(records)
        assert torch.equal(have.view(torch.int16), want.view(torch.int16))


def test_refusals(device):
    good, _ = v4_cache(512, 256, device)
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"must be uint8 \[pages, slots, 584\]"):
        triton_gather_v4.gather_v4(good.flatten(0, 1), slots)
    with pytest.raises(ValueError, match="576 bytes apart"):
        triton_gather_v4.gather_v4(good.contiguous(), slots)
