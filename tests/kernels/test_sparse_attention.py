"""Attention against the reference in float64: at most 1.5 times the error of eager bf16 torch."""

import kernel_cases as cases
import pytest
import torch

from sglang_csa2.kernels import triton_sparse_attention as kernels
from sglang_csa2.kernels.triton_sparse_attention import Tile

SCALE = cases.ATTENTION_SCALE
HEADS = cases.pick([1, 2, 4, 8, 16, 32, 64, 128], [4])
TILES = [None, Tile(16, 32, 1, 4, 2), Tile(16, 64, 4, 8, 3), Tile(64, 64, 1, 8, 2), Tile(64, 64, 2, 8, 3)]


def _check(q, swa, swa_slots, main, main_slots, sink, tile=None):
    out = kernels.sparse_attention(q, swa, swa_slots, main, main_slots, sink, SCALE, tile=tile)
    cases.check_attention(out, q, swa, swa_slots, main, main_slots, sink)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("rows", cases.pick([1, 3, 33, 130], [2]))
def test_decode(rows, heads, device):
    _check(*cases.attention_case(rows, heads, device))


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("heads", cases.pick([4, 16, 64], [4]))
def test_tiles(heads, tile, device):
    _check(*cases.attention_case(5, heads, device, absent=0.3, dtype=torch.int32), tile)


@pytest.mark.parametrize("window", cases.pick([1, 2, 127, 128, 129], [5]))
@pytest.mark.parametrize("topk", cases.pick([1, 2, 127, 128, 129, 255, 257, 511, 512, 513], [33]))
def test_widths(window, topk, device):
    _check(*cases.attention_case(3, 16, device, window=window, topk=topk))


@pytest.mark.parametrize("heads", cases.pick([4, 64], [4]))
def test_swa_only(heads, device):
    q, swa, swa_slots, _, _, sink = cases.attention_case(3, heads, device, absent=0.2)
    _check(q, swa, swa_slots, None, None, sink)


@pytest.mark.parametrize("heads", cases.pick([4, 64], [4]))
@pytest.mark.parametrize("rows", cases.pick([4, 65], [4]))
def test_absent_keys(rows, heads, device):
    _check(*cases.absent_keys_case(rows, heads, device))


@pytest.mark.parametrize("sink", [-1e4, -30.0, 30.0])
def test_sinks(sink, device):
    q, swa, swa_slots, main, main_slots, sinks = cases.attention_case(2, 4, device)
    _check(q, swa, swa_slots, main, main_slots, sinks.fill_(sink))


def test_strided_q(device):
    _check(*cases.strided_q_case(device))


@pytest.mark.skipif(cases.INTERPRETED, reason="allocates 4 GiB")
def test_slots_past_two_gib(device):
    _check(*cases.distant_slots_case(device))


def test_refusals(device):
    q, swa, swa_slots, main, main_slots, sink = cases.attention_case(2, 4, device)
    with pytest.raises(ValueError, match="go together"):
        kernels.sparse_attention(q, swa, swa_slots, main, None, sink, SCALE)
    with pytest.raises(ValueError, match="attn_sink"):
        kernels.sparse_attention(q, swa, swa_slots, main, main_slots, sink[:2], SCALE)
    with pytest.raises(ValueError, match="a head at least"):
        kernels.sparse_attention(q[:, :0], swa, swa_slots, main, main_slots, sink[:0], SCALE)
