"""Writing down what the index layers chose: one file per forward, for `show --trace` and for people who debug.

Off unless `SGLANG_CSA2_TRACE` names a folder. Then each index layer's positions are kept until the last one has
chosen, and written together. A layer that chooses in a pool also scans everything it sees, so that the file says
what the pool left out; that is the price of tracing, beside copies to the host. Forwards inside CUDA graphs are not
recorded, because their Python does not run: trace with graphs off.

A file is a dict for `torch.load`: `rows` int32 [rows] positions, `requests` int32 [rows] request slots, and `layers`,
by layer id: `positions` int32 [rows, topk], -1 padded; `blocks` int32 [rows, n] the pool it published or None;
`unrestricted` int32 [rows, topk] what it would have chosen without the pool, or None where it chose so.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_csa2 import envs
from sglang_csa2.layer_plan import LayerPlan, LayerSpec
from sglang_csa2.metadata import Csa2Metadata

logger = logging.getLogger(__name__)


class Recorder:
    """Collects one forward at a time and writes it when the last index layer has chosen."""

    def __init__(self, folder: Path, plan: LayerPlan):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._last = max(layer.layer_id for layer in plan.layers if layer.chooses)
        self._layers: dict[int, dict[str, Tensor | None]] = {}
        self._metadata: Csa2Metadata | None = None
        self._count = 0
        logger.warning("csa2 writes every choice to %s (%s is set): slow, for inspection only", folder, envs.TRACE)

    @property
    def is_live(self) -> bool:
        return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())

    def record(
        self,
        layer: LayerSpec,
        meta: Csa2Metadata,
        positions: Tensor,
        blocks: Tensor | None,
        unrestricted: Tensor | None,
    ) -> None:
        """Keep one layer's choice; on the last layer, write the forward."""
        if meta is not self._metadata:
            # Another forward, or the late layers' rows under decoder SWA bounded replay, which begin with layers of
            # their own: a file holds the layers that ran on the same rows.
            self._layers = {}
        self._metadata = meta
        self._layers[layer.layer_id] = {
            "positions": _int32(positions),
            "blocks": _int32(blocks),
            "unrestricted": _int32(unrestricted),
        }
        if layer.layer_id == self._last:
            self._write(meta)

    def _write(self, meta: Csa2Metadata) -> None:
        forward: dict[str, Any] = {
            "rows": _int32(meta.positions),
            "requests": _int32(meta.requests),
            "layers": self._layers,
        }
        # One name per process and forward; written aside first, so that a reader never sees half a file.
        path = self._folder / f"forward-{os.getpid()}-{self._count:06d}.pt"
        torch.save(forward, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
        self._layers, self._metadata = {}, None
        self._count += 1


def recorder(plan: LayerPlan) -> Recorder | None:
    """The recorder that the environment asks for, or None."""
    folder = envs.trace_folder()
    return None if folder is None else Recorder(folder, plan)


def _int32(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to("cpu", torch.int32)
