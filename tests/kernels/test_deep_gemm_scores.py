"""DeepGEMM's scores cannot run here: the calls against the installed wheel's signatures, the packing byte by byte."""

import ast
import importlib.util
from pathlib import Path

import kernel_cases as cases
import pytest
import torch

from sglang_csa2.kernels import deep_gemm_scores as kernel
from sglang_csa2.kernels.records import decode_index_k, encode_index_k
from sglang_csa2.layout import INDEX_K


def test_the_wheel_takes_these_arguments():
    spec = importlib.util.find_spec("deep_gemm")
    if spec is None:
        pytest.skip("sgl-deep-gemm is not installed")
    defined = {
        node.name: [argument.arg for argument in node.args.args]
        for node in ast.walk(ast.parse(Path(spec.origin).read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    calls = {
        node.func.attr: node
        for node in ast.walk(ast.parse(Path(kernel.__file__).read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in kernel.FUNCTIONS
    }
    assert set(calls) == set(kernel.FUNCTIONS)
    for name, call in calls.items():
        given = defined[name][: len(call.args)] + [word.arg for word in call.keywords]
        assert set(given) <= set(defined[name]) and len(given) == len(set(given)), name
    assert defined["fp8_fp4_paged_mqa_logits"][:7] == [
        "q", "kv_cache", "weights", "context_lens", "block_table", "schedule_meta", "max_context_len",
    ]  # fmt: skip
    assert defined["get_paged_sparse_mqa_logits_metadata"] == [
        "context_lens", "block_table", "indices", "page_kv", "sparse_kv_block_indices", "qk_dtype", "sparse_block_kv",
    ]  # fmt: skip


def test_packing_loses_nothing():
    """Queries are on the grid already: packed again they are the same values."""
    torch.manual_seed(0)
    records = encode_index_k(cases.latents(40, 128, torch.device("cpu")))
    q = decode_index_k(records[:, : INDEX_K.data_bytes], records[:, INDEX_K.data_bytes :]).view(5, 8, 128)
    data, scales = kernel._packed(q)
    assert data.shape == (5, 1, 8, 64) and data.dtype is torch.int8 and scales.dtype is torch.int32
    back = decode_index_k(data.view(torch.uint8), scales[..., None].view(torch.uint8))
    assert torch.equal(back[:, 0], q)
    low = scales[..., None].view(torch.uint8)[0, 0, 0]
    assert torch.equal(low, encode_index_k(q[0, 0])[INDEX_K.data_bytes :]), "the first group's scale is the low byte"


def test_keys_are_pages_of_data_and_then_scales():
    cache = torch.zeros(3, kernel.PAGE_SLOTS * INDEX_K.bytes, dtype=torch.uint8)
    keys = kernel._keys(cache)
    assert keys.shape == (3, 128, 1, 68) and keys.stride(0) % 512 == 0 and keys.data_ptr() == cache.data_ptr()


GOOD = {
    "q": torch.zeros(2, 32, 128, dtype=torch.bfloat16),
    "weights": torch.zeros(2, 32, dtype=torch.bfloat16),
    "cache": torch.zeros(3, 128 * 68, dtype=torch.uint8),
    "page_table": torch.zeros(2, 4, dtype=torch.int32),
    "visible": torch.zeros(2, dtype=torch.int64),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 8, 128, dtype=torch.bfloat16)}, "32 or 64"),
        ({"weights": torch.zeros(2, 32)}, "weights must be bf16"),
        ({"cache": torch.zeros(3, 64 * 68, dtype=torch.uint8)}, "a multiple of 512 bytes apart"),
        ({"page_table": torch.zeros(2, 4, dtype=torch.int64)}, "page_table must be int32"),
        ({"page_table": torch.zeros(4, 2, dtype=torch.int32).T}, "contiguous in its last dim"),
        ({"visible": torch.zeros(3)}, "visible must be"),
        ({"blocks": torch.zeros(2, 8, dtype=torch.int64)}, "blocks must be int32"),
    ],
)
def test_refusals(change, message):
    with pytest.raises(ValueError, match=message):
        kernel.check(**(GOOD | change))


def test_what_is_missing_is_named():
    assert "this card has 9.0" in kernel.missing(90)
