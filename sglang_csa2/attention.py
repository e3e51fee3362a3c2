"""One softmax over a row's SWA window, its chosen main KV and the sink: which keys a layer attends to.

The arithmetic is the route's `sparse_attention` (ops.py); this module says what each role reads. SWA-only layers
read their window. The others add the Top-K that their index source published, out of their kv_source's cache. Where the
forward has a workspace (a large prefill on a GPU) the keys are read from there.
"""

from __future__ import annotations

from torch import Tensor

from sglang_csa2.layer_plan import LayerSpec
from sglang_csa2.metadata import Csa2Metadata
from sglang_csa2.ops import Ops
from sglang_csa2.workspace import Workspace


def attend(
    ops: Ops,
    layer: LayerSpec,
    q: Tensor,
    swa_cache: Tensor,
    main_cache: Tensor | None,
    attn_sink: Tensor,
    scale: float,
    meta: Csa2Metadata,
    workspace: Workspace | None = None,
) -> Tensor:
    """Attention of one layer.

    Args:
        ops: the route.
        layer: its place in the plan.
        q: bf16 [rows, heads, 512], roped.
        swa_cache: uint8 [slots, 528] the layer's own window cache, or its pages (layout.py).
        main_cache: uint8 [slots, 288] its kv_source's cache, or its pages; None for an SWA-only layer.
        attn_sink: fp32 [heads].
        scale: softmax scale.
        meta: this forward's metadata.
        workspace: this forward's, or None to read packed records.

    Returns:
        bf16 [rows, heads, 512], before the inverse rotation.

    Raises:
        SelectionError: the layer's index source has not published in this forward.
    """
    topk = None
    if layer.index_source is not None:
        topk = meta.selection.consume_topk(layer.index_source, layer.layer_id)
    if workspace is not None:
        return workspace.attend(layer, q, swa_cache, main_cache, topk, attn_sink, scale)
    main_slots = None if topk is None else topk.slots
    lists = ops.lists(meta, layer.ratio, 0 if main_slots is None else main_slots.shape[1])
    return ops.sparse_attention(q, swa_cache, meta.swa_slots, main_cache, main_slots, attn_sink, scale, lists)
