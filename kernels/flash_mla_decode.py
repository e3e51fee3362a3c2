"""Sparse attention through the library FlashMLA over packed records: one call, window and main KV each with its cache.

    sparse_attention(q bf16 [n, heads, 512], swa_cache uint8 [pages, slots, bytes], swa_slots int [n, window],
                     main_cache like swa_cache | None, main_slots int [n, k] | None, attn_sink fp32 [heads], scale,
                     lists Lists | None) -> bf16 [n, heads, 512]

The contract of `sparse_attention.py`. Two pairs of caches, named by the bytes of their last dim:

| window, main | KV layout | the library's kernels                | cards                        |
|--------------|-----------|--------------------------------------|------------------------------|
| 584, 584     | `v4`      | its older half (`use_legacy=True`)   | Hopper; SM100, SM103         |
| 528, 288     | `v41`     | of 2026.09.30 (`use_legacy=False`)   | SM100, SM103; not run by us  |

The library takes 64 or 128 heads, so fewer run in a copy of q padded to 64, and int32 lists whose width is a multiple
of 64, padded with -1. It reads the first `lengths` places of each list and skips -1 among them.

`Lists` is what the layers of one compress ratio share in one forward: lengths, converted lists and the library's
schedule. The library makes the schedule at the first call and keeps it in the object it is given, on the device and
from the lengths, without checking them again; so a `Lists` belongs to one forward's metadata and is never used by the
next. In a CUDA graph the making is captured with that first call: every replay makes it anew from the live lengths.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sglang_csa2.layout import MAIN_KV, SWA_KV, V4_KV

LIST_MULTIPLE = 64
_HEADS = (64, 128)
_LEGACY = {(V4_KV.bytes, V4_KV.bytes): True, (SWA_KV.bytes, MAIN_KV.bytes): False}
# The library plans a call in 48 KB of shared memory, 20 bytes a row.
_MOST_ROWS = 1024


def missing(capability: int, layout: str) -> str | None:
    """Why the library's kernel cannot read this KV layout on a card of this capability (90 for 9.0), or None."""
    served = (90, 100, 103) if layout == "v4" else (100, 103)
    if capability not in served:
        cards = ", ".join(f"{one / 10:.1f}" for one in served)
        return (
            f"FlashMLA reads {layout} records on compute capability {cards} only, this card has {capability / 10:.1f}"
        )
    if importlib.util.find_spec("flash_mla") is None:
        return "the package sgl-flash-mla is not installed"
    return None


@dataclass
class Lists:
    """See the module. swa_lengths, main_lengths: int32 [rows], at least 1, bounds on the places that hold keys.

    The others are written by `sparse_attention`.
    """

    swa_lengths: Tensor
    main_lengths: Tensor | None
    schedules: dict[tuple[bool, int], Any] = field(default_factory=dict)
    converted: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def int32(self, name: str, slots: Tensor) -> Tensor:
        """A list as the library takes it; converted once for the layers that read the same one."""
        kept = self.converted.get(name)
        if kept is None or kept[0] is not slots:
            self.converted[name] = kept = slots, _int32(slots)
        return kept[1]

    def schedule(self, with_main: bool, top: int) -> Any:
        from flash_mla import get_mla_metadata

        if (with_main, top) not in self.schedules:
            self.schedules[with_main, top] = get_mla_metadata()[0]
        return self.schedules[with_main, top]


def sparse_attention(
    q: Tensor,
    swa_cache: Tensor,
    swa_slots: Tensor,
    main_cache: Tensor | None,
    main_slots: Tensor | None,
    attn_sink: Tensor,
    scale: float,
    lists: Lists | None = None,
) -> Tensor:
    legacy = _check(q, swa_cache, swa_slots, main_cache, main_slots, attn_sink, lists)
    rows, heads = q.shape[:2]
    if lists is None:
        lists = Lists(*(None if slots is None else _lengths(slots) for slots in (swa_slots, main_slots)))
    pad = next(size for size in _HEADS if size >= heads) - heads
    if pad:
        q, attn_sink = functional.pad(q, (0, 0, 0, pad)), functional.pad(attn_sink, (0, pad))
    swa_slots = lists.int32("swa", swa_slots)
    if main_slots is not None:
        main_slots = lists.int32("main", main_slots)
    if rows <= _MOST_ROWS:
        return _call(q, swa_cache, swa_slots, main_cache, main_slots, attn_sink, scale, lists, 0, legacy)[:, :heads]
    parts = [
        _call(q, swa_cache, swa_slots, main_cache, main_slots, attn_sink, scale, lists, top, legacy)[:, :heads]
        for top in range(0, rows, _MOST_ROWS)
    ]
    return torch.cat(parts)


def _call(q, swa_cache, swa_slots, main_cache, main_slots, attn_sink, scale, lists: Lists, top: int, legacy: bool):
    from flash_mla import flash_mla_with_kvcache

    part = slice(top, top + _MOST_ROWS)
    extra = {}
    if main_cache is not None:
        extra = {
            "extra_k_cache": main_cache[:, :, None],
            "extra_indices_in_kvcache": main_slots[part, None],
            "extra_topk_length": lists.main_lengths[part],
        }
    out, _ = flash_mla_with_kvcache(
        q=q[part, None],
        k_cache=swa_cache[:, :, None],
        block_table=None,
        cache_seqlens=None,
        head_dim_v=512,
        tile_scheduler_metadata=lists.schedule(main_cache is not None, top),
        softmax_scale=scale,
        is_fp8_kvcache=True,
        indices=swa_slots[part, None],
        attn_sink=attn_sink,
        topk_length=lists.swa_lengths[part],
        use_legacy=legacy,
        **extra,
    )
    return out[:, 0]


def _lengths(slots: Tensor) -> Tensor:
    """Places up to the last key of each row, int32, at least 1."""
    places = torch.arange(1, slots.shape[1] + 1, device=slots.device, dtype=torch.int32)
    return places.masked_fill(slots < 0, 1).amax(-1)


def _int32(slots: Tensor) -> Tensor:
    return functional.pad(slots.int(), (0, -slots.shape[1] % LIST_MULTIPLE), value=-1).contiguous()


def _check(q, swa_cache, swa_slots, main_cache, main_slots, attn_sink, lists: Lists | None) -> bool:
    """Raise on what the library would misread; whether its older half serves these caches."""
    rows, heads = q.shape[:2]
    if q.shape[2:] != (512,) or q.dtype is not torch.bfloat16 or not 1 <= heads <= _HEADS[-1]:
        raise ValueError(f"q must be bf16 [rows, 1 to {_HEADS[-1]}, 512], got {q.dtype} {list(q.shape)}")
    if (main_cache is None) != (main_slots is None):
        raise ValueError("main_cache and main_slots go together: give both, or neither for a layer without main KV")
    widths = [cache.shape[2] if cache.ndim == 3 else 0 for cache in (swa_cache, main_cache) if cache is not None]
    pair = next((known for known in _LEGACY if list(known[: len(widths)]) == widths), None)
    if pair is None:
        raise ValueError(
            f"caches must be uint8 [pages, slots, bytes] of 584 and 584 or of 528 and 288 bytes, got {widths}: "
            "FlashMLA reads no other pair"
        )
    for name, cache in (("swa_cache", swa_cache), ("main_cache", main_cache)):
        if cache is None:
            continue
        align = V4_KV.data_bytes if _LEGACY[pair] else cache.shape[2]
        if cache.dtype is not torch.uint8 or cache.stride()[1:] != (cache.shape[2], 1) or cache.stride(0) % align:
            raise ValueError(
                f"{name} must be uint8 pages a multiple of {align} bytes apart, got {cache.dtype} with strides "
                f"{cache.stride()}: view the pool's buffer"
            )
    for name, slots in (("swa_slots", swa_slots), ("main_slots", main_slots)):
        if slots is not None and (slots.ndim != 2 or len(slots) != rows or slots.dtype not in _INTS):
            raise ValueError(f"{name} must be int32 or int64 [{rows}, any], got {slots.dtype} {list(slots.shape)}")
    if attn_sink.shape != (heads,) or attn_sink.dtype is not torch.float32:
        raise ValueError(f"attn_sink must be fp32 [{heads}], got {attn_sink.dtype} {list(attn_sink.shape)}")
    if lists is not None:
        for name, lengths in (("swa_lengths", lists.swa_lengths), ("main_lengths", lists.main_lengths)):
            wanted = name == "swa_lengths" or main_slots is not None
            if wanted and (lengths is None or lengths.shape != (rows,) or lengths.dtype is not torch.int32):
                what = None if lengths is None else (lengths.dtype, list(lengths.shape))
                raise ValueError(f"{name} must be int32 [{rows}], got {what}: one Lists serves one forward's rows")
    return _LEGACY[pair]


_INTS = (torch.int32, torch.int64)
