"""The CUDA C++ attention against the reference in float64: at most 1.5 times the error of eager bf16 torch."""

import kernel_cases as cases
import pytest
import torch

from sglang_csa2.kernels import cuda_sparse_attention as kernels
from sglang_csa2.kernels.cuda_sparse_attention import Tile, choose_tile

SCALE = cases.ATTENTION_SCALE


def _hopper():
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


pytestmark = pytest.mark.skipif(cases.INTERPRETED or not _hopper(), reason="runs on Hopper (compute capability 9.0)")


def _check(q, swa, swa_slots, main, main_slots, sink, tile=None):
    out = kernels.sparse_attention(q, swa, swa_slots, main, main_slots, sink, SCALE, tile=tile)
    cases.check_attention(out, q, swa, swa_slots, main, main_slots, sink)


@pytest.fixture
def _poisoned(monkeypatch):
    """New outputs start as NaN, so that an element nobody wrote shows."""
    empty = torch.empty

    def poisoned(*shape, **options):
        return empty(*shape, **options).fill_(torch.nan)

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("heads", [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 128])
@pytest.mark.parametrize("rows", [1, 3, 33, 130, 300])
def test_decode(rows, heads, device):
    _check(*cases.attention_case(rows, heads, device))


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("splits", [1, 2, 3, 5, 8, 10])
@pytest.mark.parametrize("tile_heads", [16, 64])
@pytest.mark.parametrize("heads", [4, 16, 64, 100])
def test_tiles(heads, tile_heads, splits, device):
    case = cases.attention_case(5, heads, device, absent=0.3, dtype=torch.int32)
    _check(*case, Tile(tile_heads, splits))


@pytest.mark.parametrize("tile_heads", [16, 64])
def test_rows_taken_in_turn(tile_heads, device):
    # Several rows per block: stages and barrier phases carry over from one to the next.
    _check(*cases.attention_case(1000, tile_heads, device, topk=200, absent=0.1), Tile(tile_heads, 1))


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 127, 128, 129])
@pytest.mark.parametrize("topk", [1, 2, 63, 64, 65, 127, 129, 255, 257, 511, 512, 513])
def test_widths(window, topk, device):
    for heads in (16, 64):
        _check(*cases.attention_case(3, heads, device, window=window, topk=topk))


def test_more_splits_than_tiles(device):
    for heads in (8, 64):
        _check(*cases.attention_case(3, heads, device, window=64, topk=64), Tile(max(16, heads), 5))


@pytest.mark.parametrize("heads", [4, 64])
def test_swa_only(heads, device):
    q, swa, swa_slots, _, _, sink = cases.attention_case(3, heads, device, absent=0.2)
    _check(q, swa, swa_slots, None, None, sink)


@pytest.mark.parametrize("heads", [4, 16, 32, 64])
@pytest.mark.parametrize("rows", [4, 65, 200])
def test_absent_keys(rows, heads, device):
    _check(*cases.absent_keys_case(rows, heads, device))


@pytest.mark.parametrize("sink", [-1e4, -30.0, 30.0])
@pytest.mark.parametrize("heads", [4, 64])
def test_sinks(heads, sink, device):
    q, swa, swa_slots, main, main_slots, sinks = cases.attention_case(2, heads, device)
    _check(q, swa, swa_slots, main, main_slots, sinks.fill_(sink))


@pytest.mark.parametrize("heads", [8, 16, 64])
def test_scores_that_grow(heads, device):
    # Later keys score higher by far, so that the running maximum keeps moving.
    q, swa, swa_slots, main, main_slots, sink = cases.attention_case(4, heads, device)
    _check(q * 64, swa, swa_slots, main, main_slots, sink)


def test_strided_q(device):
    _check(*cases.strided_q_case(device))


def test_slots_past_two_gib(device):
    _check(*cases.distant_slots_case(device))


@pytest.mark.parametrize("rows", [2, 200])
def test_graph_replays_follow_the_device(rows, device):
    q, swa, swa_slots, main, main_slots, sink = cases.attention_case(rows, 16, device)
    kernels.sparse_attention(q, swa, swa_slots, main, main_slots, sink, SCALE)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.sparse_attention(q, swa, swa_slots, main, main_slots, sink, SCALE)
    q.normal_()
    swa_slots.copy_(swa_slots.roll(1, 0))
    main_slots[:, 3::7] = -1
    graph.replay()
    torch.cuda.synchronize()
    cases.check_attention(out, q, swa, swa_slots, main, main_slots, sink)


def test_same_input_same_bits(device):
    case = cases.attention_case(64, 16, device)
    for tile in (Tile(16, 1), Tile(16, 4), Tile(64, 2)):
        outs = [kernels.sparse_attention(*case, SCALE, tile=tile) for _ in range(5)]
        assert all(torch.equal(outs[0], out) for out in outs[1:])


def test_tiles_fit_a_cluster():
    for rows in (1, 2, 5, 16, 31, 64, 100, 512):
        for heads in (1, 8, 16, 20, 64, 128):
            for keys in (1, 64, 128, 640):
                tile = choose_tile(rows, heads, keys, 132)
                assert tile.heads in (16, 64)
                assert 1 <= tile.splits <= min(16, -(-keys // 64))


def test_refusals(device):
    q, swa, swa_slots, main, main_slots, sink = cases.attention_case(2, 4, device)
    with pytest.raises(ValueError, match="go together"):
        kernels.sparse_attention(q, swa, swa_slots, main, None, sink, SCALE)
    with pytest.raises(ValueError, match="attn_sink"):
        kernels.sparse_attention(q, swa, swa_slots, main, main_slots, sink[:2], SCALE)
    with pytest.raises(ValueError, match="a head at least"):
        kernels.sparse_attention(q[:, :0], swa, swa_slots, main, main_slots, sink[:0], SCALE)
    with pytest.raises(ValueError, match="one CUDA device"):
        kernels.sparse_attention(q, swa, swa_slots.cpu(), main, main_slots, sink, SCALE)
    odd = torch.randn(2, 4, 516, device=device).bfloat16()[..., :512]
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        kernels.sparse_attention(odd, swa, swa_slots, main, main_slots, sink, SCALE)
    with pytest.raises(RuntimeError, match="did not launch"):
        kernels.sparse_attention(q, swa, swa_slots, main, main_slots, sink, SCALE, tile=Tile(24, 1))
