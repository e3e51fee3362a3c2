"""Gathering and decoding, bit for bit: also the test that both decoders agree with records.py on every byte."""

import kernel_cases as cases
import pytest
import torch

from sglang_csa2.kernels import records
from sglang_csa2.kernels import triton_gather as kernels

RECORDS = [
    (kernels.gather_swa_kv, cases.swa_cache, records.decode_swa_kv),
    (kernels.gather_main_kv, cases.main_cache, records.decode_main_kv),
]


@pytest.mark.parametrize("count", cases.pick([1, 2, 7, 8, 9, 127, 513], [1, 9]))
@pytest.mark.parametrize(("gather", "make", "decode"), RECORDS)
def test_gather(gather, make, decode, count, device):
    cache = make(100, device)
    slots = torch.randint(0, 100, (count,), device=device)
    slots[torch.rand(count, device=device) < 0.3] = -1
    out = torch.full((count, 512), torch.nan, dtype=torch.bfloat16, device=device)
    assert gather(cache, slots.int(), out) is out
    want = decode(cache[slots.clamp(min=0)]).masked_fill(slots[:, None] < 0, 0)
    assert torch.equal(out.view(torch.int16), want.view(torch.int16))


def test_every_e4m3_byte(device):
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    codes = codes[(codes & 0x7F) != 0x7F]
    cache = torch.zeros(len(codes), 528, dtype=torch.uint8, device=device)
    cache[:, :512] = codes[:, None]
    for scale in (90, 127, 140):
        cache[:, 512:] = scale
        have, want = kernels.gather_swa_kv(cache, torch.arange(len(codes), device=device)), records.decode_swa_kv(cache)
        assert torch.equal(have.view(torch.int16), want.view(torch.int16))


def test_every_main_scale_and_nibble(device):
    scales = torch.arange(0, 0x7F, dtype=torch.uint8, device=device)
    cache = torch.empty(len(scales), 288, dtype=torch.uint8, device=device)
    cache[:, :256] = torch.arange(256, dtype=torch.uint8, device=device)
    cache[:, 256:] = scales[:, None]
    have, want = kernels.gather_main_kv(cache, torch.arange(len(scales), device=device)), records.decode_main_kv(cache)
    assert torch.equal(have.view(torch.int16), want.view(torch.int16))
