"""The library's prefill kernel behind our wrapper, against float64, with NaN in every key that no row lists."""

import kernel_cases as cases
import pytest
import torch

from sglang_csa2.kernels import flash_mla_prefill as kernel
from sglang_csa2.reference import sparse_attention as reference

SCALE = 512**-0.5


def _capability():
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    return 10 * major + minor


needs_library = pytest.mark.skipif(
    cases.INTERPRETED or kernel.missing(_capability()) is not None, reason="FlashMLA does not run here"
)


def _case(rows, heads, keys, listed, device):
    q = torch.randn(rows, heads, 512, device=device).bfloat16()
    kv = torch.full((keys, 512), torch.nan, dtype=torch.bfloat16, device=device)
    indices = torch.full((rows, -(-listed // 128) * 128), -1, dtype=torch.int32, device=device)
    lengths = torch.randint(1, listed + 1, (rows,), device=device).int()
    lengths[0] = listed
    for row, length in enumerate(lengths.tolist()):
        chosen = torch.randperm(keys // 2, device=device)[:length].int() * 2
        indices[row, :length] = chosen.masked_fill(torch.rand(length, device=device) < 0.1, -1)
    kv[::2] = torch.randn(len(kv[::2]), 512, device=device).bfloat16()
    return q, kv, indices, lengths, torch.randn(heads, device=device)


@needs_library
@pytest.mark.parametrize("heads", [64, 128, 32, 16, 8, 4])
@pytest.mark.parametrize(("rows", "listed"), [(1, 1), (63, 128), (300, 257), (300, 640)])
def test_against_float64(rows, listed, heads, device, monkeypatch):
    # Heads below 64 run padded, some rows at a time.
    monkeypatch.setattr(kernel, "_PADDED_ROWS", 128)
    q, kv, indices, lengths, sink = _case(rows, heads, 2000, listed, device)
    out = kernel.sparse_prefill(q, kv, indices, lengths, sink, SCALE)
    clean = kv.nan_to_num()
    exact = reference(q, clean, indices.long(), sink, SCALE, dtype=torch.float64)
    eager = reference(q, clean, indices.long(), sink, SCALE, dtype=torch.bfloat16)
    error, bound = cases.relative_error(out, exact), cases.relative_error(eager, exact)
    assert error <= cases.SLACK * bound
    assert torch.equal(out, kernel.sparse_prefill(q, kv, indices, None, sink, SCALE)), "lengths changed the result"


@needs_library
def test_a_row_without_keys_gives_zeros(device):
    q, kv, indices, _, sink = _case(5, 64, 200, 50, device)
    indices[2] = -1
    assert (kernel.sparse_prefill(q, kv, indices, None, sink, SCALE)[2] == 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indices": torch.zeros(2, 192, dtype=torch.int32)}, "multiple of 128"),
        ({"indices": torch.zeros(2, 128)}, "must be int32"),
        ({"q": torch.zeros(2, 129, 512, dtype=torch.bfloat16)}, "1 to 128"),
        ({"kv": torch.zeros(9, 1024, dtype=torch.bfloat16)[:, ::2]}, "contiguous bf16"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, "lengths must be"),
        ({"attn_sink": torch.zeros(4)}, "attn_sink must be"),
    ],
)
def test_refusals(change, message):
    good = {
        "q": torch.zeros(2, 8, 512, dtype=torch.bfloat16),
        "kv": torch.zeros(9, 512, dtype=torch.bfloat16),
        "indices": torch.zeros(2, 128, dtype=torch.int32),
        "lengths": None,
        "attn_sink": torch.zeros(8),
    }
    with pytest.raises(ValueError, match=message):
        kernel._check(**(good | change))


def test_what_is_missing_is_named():
    assert "compute capability 8.0" in kernel.missing(80)
