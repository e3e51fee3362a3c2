"""V4 records byte by byte: where each byte lies in a page, what it holds, and what a key loses."""

from __future__ import annotations

import pytest
import torch

from sglang_csa2.kernels import records, records_v4
from sglang_csa2.layout import V4, V4_KV, V41


def _pages(count: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    buffer = torch.full((count, V4.page_bytes(V4_KV, slots)), 0xAB, dtype=torch.uint8)
    return buffer, records_v4.pages_of(buffer, slots)


@pytest.mark.parametrize(("slots", "page_bytes"), [(256, 149760), (128, 74880)])
def test_a_record_lies_where_the_format_says(slots, page_bytes):
    """Page p, place i: data at 576 i, scales at 576 slots + 8 i, nothing else touched (spec 2b)."""
    buffer, cache = _pages(3, slots)
    assert buffer.shape[1] == page_bytes and page_bytes % 576 == 0
    key = torch.zeros(2, 512)
    key[0, 0], key[0, 63], key[0, 64], key[0, 447] = 448.0, -1.0, 3.0, -0.5
    key[0, 448], key[0, 511] = 1.5, -2.0
    key[1] = 1.0
    before = buffer.clone()
    records_v4.write_v4(cache, torch.tensor([slots + 5, -1]), records_v4.encode_v4(key))
    record = torch.zeros(576, dtype=torch.uint8)
    # 448 and -1 under 2^0; 3 under 2^-7 is 384; -0.5 under 2^-9 is -256.
    record[0], record[63], record[64], record[447] = 0x7E, 0xB8, 0x7C, 0xF8
    record[448:450] = torch.tensor([0xC0, 0x3F], dtype=torch.uint8)
    record[574:576] = torch.tensor([0x00, 0xC0], dtype=torch.uint8)
    assert torch.equal(buffer[1, 576 * 5 : 576 * 6], record)
    least = 127 - 22  # 2^ceil(log2(1e-4 / 448)): a group of zeros
    scales = [127, 120, *[least] * 4, 118, 0]
    assert buffer[1, 576 * slots + 8 * 5 :][:8].tolist() == scales
    before[1, 576 * 5 : 576 * 6] = record
    before[1, 576 * slots + 8 * 5 :][:8] = torch.tensor(scales, dtype=torch.uint8)
    assert torch.equal(buffer, before)
    assert torch.equal(records_v4.read_v4(cache, torch.tensor([slots + 5])).float(), key[:1])


def test_scales_are_of_groups_of_64_and_round_up():
    key = torch.zeros(1, 512)
    for group in range(7):
        key[0, 64 * group] = 448 * 2.0 ** (group - 3) * (1.01 if group == 6 else 1.0)
    record = records_v4.encode_v4(key)
    assert record[0, 576:].tolist() == [124, 125, 126, 127, 128, 129, 131, 0]


def test_every_code_comes_back():
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    record = torch.zeros(len(codes), 584, dtype=torch.uint8)
    record[:, :448], record[:, 576:583] = codes[:, None], 130
    values = records_v4.decode_v4(record)
    assert torch.equal(values[:, :448], (codes.view(torch.float8_e4m3fn).bfloat16() * 8)[:, None].expand(-1, 448))


@pytest.mark.parametrize(
    ("encode", "decode", "kept", "straight"),
    [
        (records.encode_swa_kv, records.decode_swa_kv, 1e-6, (0.007, 0.011)),
        (records.encode_main_kv, records.decode_main_kv, 0.022, (0.09, 0.105)),
    ],
    ids=["window", "main"],
)
def test_what_a_key_loses(encode, decode, kept, straight):
    """By way of the model's grid hardly anything of window KV and 2 % of main KV; straight from the latent more."""
    torch.manual_seed(0)
    latent = torch.randn(2048, 512).bfloat16()
    model = decode(encode(latent)).double()

    def loss(values):
        return ((values.double() - model).norm() / model.norm()).item()

    assert loss(records_v4.decode_v4(records_v4.encode_v4(model.bfloat16()))) < kept
    low, high = straight
    assert low < loss(records_v4.decode_v4(records_v4.encode_v4(latent))) < high


def test_page_bytes():
    assert (V41.swa_bytes, V41.main_bytes(1), V41.main_bytes(2)) == (528, 288, 288)
    assert (V4.swa_bytes, V4.main_bytes(1), V4.main_bytes(2)) == (585, 585, 585)
