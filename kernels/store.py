"""The three fused stores: normalise, rotate, quantize, pack, write (spec 2.3 to 2.6).

    swa_store      kv     [n, 512] any strides -> cache uint8 [slots, 528]
    main_kv_store  latent [n, 512] normalised  -> cache uint8 [slots, 288]
    swa_store_v4, main_kv_store_v4             -> cache uint8 [pages, slots, 584], the same values as V4 records
    index_k_store  key    [n, 128] projected   -> cache uint8 [pages, 64 * 68]

Row i goes to `slots[i]`; a negative slot writes nothing. `table` is complex64 [positions, 32], looked up at
`positions[i]` (the token's own position, or the first token's of a compressed group). Slots within one call
are distinct.

The V4 stores round to the model's own grid first and encode the result: nearer to the model than encoding the latent
(records_v4.py).

Torch form: device-agnostic, used on CPU.
"""

from __future__ import annotations

from torch import Tensor

from sglang_csa2.kernels.norm_rope import rms_norm, rotate_tail
from sglang_csa2.kernels.records import decode_main_kv, decode_swa_kv, encode_index_k, encode_main_kv, encode_swa_kv
from sglang_csa2.kernels.records_v4 import encode_v4, write_v4
from sglang_csa2.layout import INDEX_K


def swa_store(
    kv: Tensor, weight: Tensor, eps: float, table: Tensor, positions: Tensor, slots: Tensor, cache: Tensor
) -> None:
    roped = rotate_tail(rms_norm(kv, weight, eps), table[positions])
    _write_rows(cache, slots, encode_swa_kv(roped))


def main_kv_store(latent: Tensor, table: Tensor, positions: Tensor, slots: Tensor, cache: Tensor) -> None:
    _write_rows(cache, slots, encode_main_kv(rotate_tail(latent, table[positions])))


def swa_store_v4(
    kv: Tensor, weight: Tensor, eps: float, table: Tensor, positions: Tensor, slots: Tensor, cache: Tensor
) -> None:
    roped = rotate_tail(rms_norm(kv, weight, eps), table[positions])
    write_v4(cache, slots, encode_v4(decode_swa_kv(encode_swa_kv(roped))))


def main_kv_store_v4(latent: Tensor, table: Tensor, positions: Tensor, slots: Tensor, cache: Tensor) -> None:
    roped = rotate_tail(latent, table[positions])
    write_v4(cache, slots, encode_v4(decode_main_kv(encode_main_kv(roped))))


def index_k_store(
    key: Tensor, weight: Tensor, eps: float, table: Tensor, positions: Tensor, slots: Tensor, cache: Tensor
) -> None:
    records = encode_index_k(rotate_tail(rms_norm(key, weight, eps), table[positions]))
    live = slots >= 0
    slots, records = slots[live].long(), records[live]
    data, scales = index_page_views(cache)
    page, offset = slots // data.shape[1], slots % data.shape[1]
    data[page, offset] = records[:, : INDEX_K.data_bytes]
    scales[page, offset] = records[:, INDEX_K.data_bytes :]


def index_page_views(cache: Tensor) -> tuple[Tensor, Tensor]:
    """An index-K cache as data [pages, slots, 64] and scales [pages, slots, 4] (64 slots a page), both views."""
    slots = cache.shape[1] // INDEX_K.bytes
    data = cache[:, : slots * INDEX_K.data_bytes].unflatten(-1, (slots, INDEX_K.data_bytes))
    scales = cache[:, slots * INDEX_K.data_bytes :].unflatten(-1, (slots, INDEX_K.scale_bytes))
    return data, scales


def _write_rows(cache: Tensor, slots: Tensor, records: Tensor) -> None:
    live = slots >= 0
    cache[slots[live].long()] = records[live]
