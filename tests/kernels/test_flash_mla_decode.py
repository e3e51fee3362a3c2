"""The library's decode kernels behind our wrapper: V4 records against float64, and what the wrapper refuses."""

import kernel_cases as cases
import pytest
import torch

from sglang_csa2.kernels import flash_mla_decode as kernel
from sglang_csa2.kernels.records_v4 import encode_v4, pages_of, read_v4, write_v4
from sglang_csa2.layout import MAIN_KV, SWA_KV, V4

POISON = 0x7F


def _missing():
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    return kernel.missing(10 * major + minor, "v4")


needs_library = pytest.mark.skipif(
    cases.INTERPRETED or _missing() is not None, reason="FlashMLA's V4 kernels do not run here"
)


def _cache(slots, page_slots, device):
    """Random keys, and poison in the last 100 slots and in the padding."""
    shape = -(-slots // page_slots), V4.page_bytes(V4.main, page_slots)
    cache = pages_of(torch.full(shape, POISON, dtype=torch.uint8, device=device), page_slots)
    keys = encode_v4(cases.latents(slots - 100, 512, device))
    write_v4(cache, torch.arange(slots - 100, device=device), keys)
    return cache


def _case(rows, heads, device, *, topk=512, dtype=torch.int64):
    """q, caches, slots whose keys come first in their lists with holes among them, sink, lengths."""
    q = (torch.randn(rows, heads, 512, device=device) * 2).bfloat16()
    swa, main = _cache(1500, 256, device), _cache(1500, 128, device)
    lists, lengths = [], []
    for width in (128, topk):
        slots = cases.random_slots(rows, width, 1400, device, absent=0.05, dtype=dtype)
        length = torch.randint(1, width + 1, (rows,), device=device)
        length[0] = width
        slots[torch.arange(width, device=device) >= length[:, None]] = -1
        lists.append(slots)
        lengths.append(length.int())
    return (q, swa, lists[0], main, lists[1], torch.randn(heads, device=device)), lengths


def _check(out, q, swa, swa_slots, main, main_slots, sink):
    slots, parts = [swa_slots], [read_v4(swa, swa_slots.clamp(min=0).long())]
    if main is not None:
        slots.append(main_slots)
        parts.append(read_v4(main, main_slots.clamp(min=0).long()))
    none, keys = torch.cat(slots, 1) < 0, torch.cat(parts, 1)
    keys = keys.masked_fill(none[..., None], 0)
    exact = cases.eager_attention(q, keys, none, sink, torch.float64)
    bound = cases.relative_error(cases.eager_attention(q, keys, none, sink, torch.bfloat16), exact)
    assert (out[none.all(-1)] == 0).all()
    assert cases.relative_error(out, exact) <= cases.SLACK * bound


@needs_library
@pytest.mark.parametrize("heads", [64, 128, 32, 16, 4])
@pytest.mark.parametrize(("rows", "topk"), [(1, 512), (32, 512), (128, 512), (7, 100), (300, 64)])
def test_against_float64(rows, topk, heads, device):
    inputs, (window, chosen) = _case(rows, heads, device, topk=topk)
    for lists in (None, kernel.Lists(window, chosen)):
        _check(kernel.sparse_attention(*inputs, cases.ATTENTION_SCALE, lists), *inputs)


@needs_library
def test_window_alone_and_rows_in_parts(device, monkeypatch):
    monkeypatch.setattr(kernel, "_MOST_ROWS", 50)
    (q, swa, swa_slots, main, main_slots, sink), lengths = _case(130, 64, device, dtype=torch.int32)
    lists = kernel.Lists(*lengths)
    _check(kernel.sparse_attention(q, swa, swa_slots, main, main_slots, sink, cases.ATTENTION_SCALE, lists),
           q, swa, swa_slots, main, main_slots, sink)  # fmt: skip
    lists = kernel.Lists(lengths[0], None)
    out = kernel.sparse_attention(q, swa, swa_slots, None, None, sink, cases.ATTENTION_SCALE, lists)
    _check(out, q, swa, swa_slots, None, None, sink)
    assert len(lists.schedules) == 3


@needs_library
def test_rows_without_keys_give_zeros(device):
    (q, swa, swa_slots, main, main_slots, sink), _ = _case(5, 64, device)
    swa_slots[2], main_slots[2], main_slots[3] = -1, -1, -1
    _check(
        kernel.sparse_attention(q, swa, swa_slots, main, main_slots, sink, cases.ATTENTION_SCALE),
        q, swa, swa_slots, main, main_slots, sink,
    )  # fmt: skip


@needs_library
def test_a_captured_schedule_follows_the_live_lengths(device):
    """Two layers of one forward in a graph: lengths and lists change between replays, the schedule with them."""
    first, lengths = _case(32, 64, device)
    static = [x.clone() for x in first]
    static_lengths = [x.clone() for x in lengths]

    def forward():
        lists = kernel.Lists(*static_lengths)
        return [kernel.sparse_attention(*static, cases.ATTENTION_SCALE, lists) for _ in range(2)]

    # The caches' views must stay views of whole pages, which a clone is not.
    static[1], static[3] = first[1], first[3]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = forward()
    for share in (1.0, 0.01, 0.5):
        inputs, lengths = _case(32, 64, device)
        window, chosen = inputs[2], inputs[4]
        for slots, length in ((window, lengths[0]), (chosen, lengths[1])):
            length.copy_((length * share).clamp(min=1))
            slots[torch.arange(slots.shape[1], device=device) >= length[:, None]] = -1
        for at in (0, 2, 4, 5):
            static[at].copy_(inputs[at])
        for kept, live in zip(static_lengths, lengths, strict=True):
            kept.copy_(live)
        graph.replay()
        for out in outputs:
            _check(out, *static)


def _cpu_case():
    q = torch.zeros(2, 8, 512, dtype=torch.bfloat16)
    swa = pages_of(torch.zeros(2, V4.page_bytes(V4.swa, 256), dtype=torch.uint8), 256)
    slots = torch.zeros(2, 128, dtype=torch.int64)
    return {
        "q": q, "swa_cache": swa, "swa_slots": slots, "main_cache": swa, "main_slots": slots,
        "attn_sink": torch.zeros(8), "lists": None,
    }  # fmt: skip


ONES = torch.ones(2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 129, 512, dtype=torch.bfloat16)}, "1 to 128"),
        ({"main_cache": None}, "go together"),
        ({"main_cache": torch.zeros(2, 128, 288, dtype=torch.uint8)}, "FlashMLA reads no other pair"),
        ({"swa_cache": torch.zeros(512, 584, dtype=torch.uint8)}, "FlashMLA reads no other pair"),
        ({"swa_cache": torch.zeros(2, 256, 584, dtype=torch.uint8)}, "a multiple of 576 bytes apart"),
        ({"main_slots": torch.zeros(3, 64, dtype=torch.int64)}, r"must be int32 or int64 \[2, any\]"),
        ({"swa_slots": torch.zeros(2, 64)}, "must be int32 or int64"),
        ({"attn_sink": torch.zeros(4)}, "attn_sink must be"),
        ({"lists": kernel.Lists(torch.ones(3, dtype=torch.int32), ONES)}, "serves one forward's rows"),
        ({"lists": kernel.Lists(ONES, None)}, "main_lengths must be"),
    ],
)
def test_refusals(change, message):
    with pytest.raises(ValueError, match=message):
        kernel._check(**(_cpu_case() | change))


def test_pairs_of_caches():
    assert kernel._check(**_cpu_case()) is True
    window, main = torch.zeros(4, 128, SWA_KV.bytes, dtype=torch.uint8), torch.zeros(4, 128, MAIN_KV.bytes).byte()
    assert kernel._check(**(_cpu_case() | {"swa_cache": window, "main_cache": main})) is False


def test_the_wheel_takes_these_arguments():
    """The call that is made, against the installed wheel's signature; no card is asked."""
    import ast
    import importlib.util
    from pathlib import Path

    if importlib.util.find_spec("flash_mla") is None:
        pytest.skip("sgl-flash-mla is not installed")
    source = Path(importlib.util.find_spec("flash_mla").origin).with_name("flash_mla_interface.py").read_text()
    (function,) = (node for node in ast.parse(source).body if getattr(node, "name", None) == "flash_mla_with_kvcache")
    taken = {argument.arg for argument in function.args.args}
    ours = ast.parse(Path(kernel.__file__).read_text())
    calls = [n for n in ast.walk(ours) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == function.name]
    extra = {"extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"}
    assert {word.arg for word in calls[0].keywords if word.arg} | extra <= taken
    docstring = ast.get_docstring(function)
    assert "528 (V4.1 fp8) or 288 (V4.1 fp4" in docstring and "num_heads_q` must be 64 or 128" in docstring


def test_what_is_missing_is_named():
    assert "v41 records on compute capability 10.0, 10.3 only, this card has 9.0" in kernel.missing(90, "v41")
    assert "this card has 8.0" in kernel.missing(80, "v4")
