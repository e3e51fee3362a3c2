"""What the kernel tests share: random inputs, poison, and the error bound.

The bound: a kernel's relative error against float64 is at most `SLACK` times that of eager bf16 torch.
"""

import importlib
import os

import pytest
import torch

from sglang_csa2.kernels import cuda_build
from sglang_csa2.kernels.records import (
    decode_main_kv,
    decode_swa_kv,
    encode_index_k,
    encode_main_kv,
    encode_swa_kv,
)
from sglang_csa2.layout import (
    INDEX_K,
    INDEX_PAGE_BYTES,
    INDEX_PAGE_SCALE_OFFSET,
    INDEX_PAGE_SLOTS,
    MAIN_KV,
    PAGE_TOKENS,
    SWA_KV,
)

SLACK = 1.5
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
EPS = 1e-20


def pick(full, small):
    """Parameter lists: all on a GPU, a few in the interpreter."""
    return small if INTERPRETED else full


def module_of(name):
    """A module of kernels; the test is skipped where it is of CUDA C++ and cannot run."""
    if name.startswith("cuda_"):
        if INTERPRETED or not torch.cuda.is_available():
            pytest.skip("runs on Hopper")
        major, minor = torch.cuda.get_device_capability()
        missing = cuda_build.missing(10 * major + minor)
        if missing:
            pytest.skip(missing)
    return importlib.import_module(f"sglang_csa2.kernels.{name}")


def poison_outputs(monkeypatch):
    """New tensors hold NaN, or -77."""
    real = torch.empty
    monkeypatch.setattr(
        torch,
        "empty",
        lambda *size, dtype=None, device=None: real(*size, dtype=dtype, device=device).fill_(
            torch.nan if dtype is None or dtype.is_floating_point else -77
        ),
    )


def relative_error(out, ref):
    assert torch.isfinite(out).all(), "a NaN or an infinity came out"
    return ((out.double() - ref.double()).norm() / ref.double().norm().clamp(min=1e-300)).item()


def worst_error(out, ref):
    """The largest relative error of a vector of the last dim; where the reference is zero, of any other value."""
    assert torch.isfinite(out).all(), "a NaN or an infinity came out"
    return ((out.double() - ref.double()).norm(dim=-1) / ref.double().norm(dim=-1).clamp(min=1e-300)).max().item()


def rope_table(positions, device):
    angles = torch.arange(positions, device=device).float()[:, None] * torch.logspace(0, -4, 32, device=device)
    return torch.polar(torch.ones_like(angles), angles)


def latents(rows, dims, device):
    """bf16 rows whose groups differ in size, with zeros of both signs among them."""
    x = torch.randn(rows, dims, device=device) * torch.rand(rows, dims // 16, device=device).repeat_interleave(16, 1)
    x[torch.rand_like(x) < 0.02] = 0.0
    x[torch.rand_like(x) < 0.02] *= -1
    return x.bfloat16()


def swa_cache(slots, device):
    return encode_swa_kv(latents(slots, 512, device))


def main_cache(slots, device):
    return encode_main_kv(latents(slots, 512, device))


def index_cache(slots, device):
    """uint8 [slots / 64, 64 * 68] of random keys."""
    records = encode_index_k(latents(slots, 128, device)).view(-1, INDEX_PAGE_SLOTS, INDEX_K.bytes)
    pages = torch.empty(len(records), INDEX_PAGE_BYTES, dtype=torch.uint8, device=device)
    pages[:, :INDEX_PAGE_SCALE_OFFSET] = records[..., : INDEX_K.data_bytes].flatten(1)
    pages[:, INDEX_PAGE_SCALE_OFFSET:] = records[..., INDEX_K.data_bytes :].flatten(1)
    return pages


def paged_context(requests, tokens, device):
    """req_to_token int32 [requests, tokens rounded up]: each request's pages in random order; and the full slots."""
    pages = -(-tokens // PAGE_TOKENS)
    order = torch.randperm(requests * pages, device=device).view(requests, pages)
    slots = order[..., None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS, device=device)
    return slots.flatten(1).int(), requests * pages * PAGE_TOKENS


def random_slots(rows, width, slots, device, *, absent=0.0, dtype=torch.int64):
    """Distinct slots per row where possible, a share of them -1."""
    chosen = torch.stack([torch.randperm(max(slots, width), device=device)[:width] % slots for _ in range(rows)])
    chosen[torch.rand(rows, width, device=device) < absent] = -1
    return chosen.to(dtype)


ATTENTION_SCALE = 512**-0.5


def attention_case(rows, heads, device, *, window=128, topk=512, absent=0.0, slots=1500, dtype=torch.int64):
    """q, SWA cache and slots, main cache and slots, sink; junk (NaN codes) in slots that no list names."""
    q = (torch.randn(rows, heads, 512, device=device) * 2).bfloat16()
    swa, main = swa_cache(slots, device), main_cache(slots, device)
    swa_slots = random_slots(rows, window, slots - 100, device, absent=absent, dtype=dtype)
    main_slots = random_slots(rows, topk, slots - 100, device, absent=absent, dtype=dtype)
    swa[slots - 100 :] = 255
    main[slots - 100 :] = 255
    return q, swa, swa_slots, main, main_slots, torch.randn(heads, device=device)


def absent_keys_case(rows, heads, device):
    """Rows with no key, with one, with no window, with a tail of no keys; a slot that is not read holds anything."""
    q, swa, swa_slots, main, main_slots, sink = attention_case(rows, heads, device)
    swa_slots[0], main_slots[0] = -1, -1
    swa_slots[1, 1:], main_slots[1] = -1, -1
    swa_slots[2], main_slots[2, :300] = -1, -1
    main_slots[3, 77:] = -1
    swa[-1], main[-1] = 255, 255
    return q, swa, swa_slots, main, main_slots, sink


def strided_q_case(device):
    q, *rest = attention_case(3, 8, device)
    wide = torch.randn(3, 16, 1024, device=device).bfloat16()
    wide[:, :8, :512] = q
    return wide[:, :8, :512], *rest


def distant_slots_case(device):
    """Slots whose bytes lie past 2^31 in both caches."""
    q, swa, swa_slots, main, main_slots, sink = attention_case(2, 64, device)
    big_swa = torch.empty(2**31 // SWA_KV.bytes + 2000, SWA_KV.bytes, dtype=torch.uint8, device=device)
    big_main = torch.empty(2**31 // MAIN_KV.bytes + 2000, MAIN_KV.bytes, dtype=torch.uint8, device=device)
    big_swa[-len(swa) :], big_main[-len(main) :] = swa, main
    swa_slots = swa_slots + len(big_swa) - len(swa)
    main_slots = main_slots + len(big_main) - len(main)
    return q, big_swa, swa_slots, big_main, main_slots, sink


def eager_attention(q, keys, none, sink, dtype):
    """The formula in `dtype` throughout."""
    q, keys = q.to(dtype), keys.to(dtype).masked_fill(none[..., None], 0)
    scores = (torch.einsum("nhd,nkd->nhk", q, keys) * ATTENTION_SCALE).masked_fill(none[:, None], -torch.inf)
    column = sink.to(dtype)[None, :, None].expand(len(q), -1, 1)
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return torch.einsum("nhk,nkd->nhd", weights, keys)


def check_attention(out, q, swa, swa_slots, main, main_slots, sink):
    """Zeros where a row has no key; elsewhere the error bound."""
    keys = decode_swa_kv(swa[swa_slots.clamp(min=0).long()])
    none = swa_slots < 0
    if main is not None:
        keys = torch.cat([keys, decode_main_kv(main[main_slots.clamp(min=0).long()])], 1)
        none = torch.cat([none, main_slots < 0], 1)
    keys = keys.masked_fill(none[..., None], 0)
    exact = eager_attention(q, keys, none, sink, torch.float64)
    absent = none.all(-1)
    assert (out[absent] == 0).all()
    if absent.all():
        return
    eager = eager_attention(q, keys, none, sink, torch.bfloat16)
    # Over all, and so that no head of a row hides among the others.
    for error in (relative_error, worst_error):
        assert error(out, exact) <= SLACK * error(eager, exact)
