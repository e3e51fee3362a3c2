"""Record bytes: exact against the published quantization, layout pinned byte by byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sglang_csa2 import reference
from sglang_csa2.kernels import records, store
from sglang_csa2.layout import INDEX_K, INDEX_PAGE_BYTES, INDEX_PAGE_SLOTS, MAIN_KV, SWA_KV

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "data" / "quantization.safetensors")


def decode_index(packed):
    return records.decode_index_k(packed[..., : INDEX_K.data_bytes], packed[..., INDEX_K.data_bytes :])


FORMATS = {
    "fp8_block32": (512, SWA_KV, records.encode_swa_kv, records.decode_swa_kv, reference.quantize_swa_kv),
    "fp4_block16_e4m3": (512, MAIN_KV, records.encode_main_kv, records.decode_main_kv, reference.quantize_main_kv),
    "fp4_block32_ue8m0": (128, INDEX_K, records.encode_index_k, decode_index, reference.quantize_index),
}


def bits(x):
    return x.view(torch.int16)


@pytest.mark.parametrize("name", FORMATS)
def test_golden_quantization(name):
    dims, _, encode, decode, quantize = FORMATS[name]
    x = GOLDEN["x"][:, :dims]
    assert torch.equal(bits(quantize(x)), bits(GOLDEN[name]))
    assert torch.equal(bits(decode(encode(x))), bits(GOLDEN[name]))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("spread", [0, 4, 12])
def test_records_hold_the_reference_values(name, spread):
    dims, record, encode, decode, quantize = FORMATS[name]
    generator = torch.Generator().manual_seed(spread)
    scale = torch.exp2(torch.randint(-spread, spread + 1, (257, dims), generator=generator).float())
    x = (torch.randn(257, dims, generator=generator) * scale).bfloat16()
    packed = encode(x)
    assert packed.shape == (257, record.bytes) and packed.dtype is torch.uint8
    assert torch.equal(bits(decode(packed)), bits(quantize(x)))
    # On the grid already: a second trip changes nothing but the sign of zero.
    assert torch.equal(decode(encode(decode(packed))), decode(packed))


def test_every_e2m1_value_and_tie():
    x = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, -0.0])
    expected = [0, 0, 0.5, 1, 1, 1, 1.5, 2, 2, 2, 3, 4, 4, 4, 6, 0]
    assert reference.round_e2m1(x).tolist() == expected
    row = x.repeat(32)[None].bfloat16()
    assert records.decode_main_kv(records.encode_main_kv(row))[0, :16].tolist() == expected
    assert torch.signbit(records.decode_main_kv(records.encode_main_kv(row))[0, 15])


def test_byte_order_is_pinned():
    x = torch.zeros(1, 512)
    x[0, 0], x[0, 1] = 6.0, -1.0
    main = records.encode_main_kv(x)[0]
    assert main[0].item() == 0x7 | (0xA << 4)  # even dim in the low nibble
    assert main[256].item() == 0x38  # e4m3 of 1.0
    swa = records.encode_swa_kv(torch.full((1, 512), 448.0))[0]
    assert swa[0].item() == 0x7E and swa[512].item() == 127
    index = records.encode_index_k(x[:, :128])[0]
    assert index[0].item() == 0x7 | (0xA << 4) and index[64].item() == 127


def test_index_pages_keep_data_before_scales():
    cache = torch.full((3, INDEX_PAGE_BYTES), 0xFF, dtype=torch.uint8)
    key, weight = torch.randn(2, 128).bfloat16(), torch.ones(128)
    table = reference.rope_table(torch.arange(8), reference.rope_frequencies(64, 160000.0, reference.Yarn()))
    slots = torch.tensor([INDEX_PAGE_SLOTS + 5, -1])
    store.index_k_store(key, weight, 1e-20, table, torch.tensor([3, 4]), slots, cache)
    roped = reference.rotate_tail(reference.rms_norm(key, weight, 1e-20), table[[3, 4]])
    packed = records.encode_index_k(roped)[0]
    page = cache[1]
    assert torch.equal(page[5 * 64 : 6 * 64], packed[:64])
    assert torch.equal(page[64 * 64 + 5 * 4 : 64 * 64 + 6 * 4], packed[64:])
    assert (cache == 0xFF).sum() >= cache.numel() - 68  # nothing else was written


def test_wrong_width_is_refused():
    with pytest.raises(ValueError, match="swa_kv records hold 512 values"):
        records.encode_swa_kv(torch.zeros(1, 128))


def test_yarn_frequencies_of_the_release():
    plain = reference.rope_frequencies(64, 160000.0, None)
    scaled = reference.rope_frequencies(64, 160000.0, reference.Yarn())
    assert torch.equal(scaled[:16], plain[:16]) and torch.allclose(scaled[25:], plain[25:] / 16)
