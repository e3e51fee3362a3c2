"""What a DeepSeek-V4.1 checkpoint takes on each GPU: its files' sizes if they are there, else by its config.

By the config it is an estimate: the matrices of the model at their stored widths. Linears are split over the tensor
parallel ranks, except the small latent projections and the indexer, which every rank keeps whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_csa2.config import ConfigError
from sglang_csa2.layer_plan import LayerPlan

# Bytes per value with its scales: e4m3 in tiles of 32 x 32, e2m1 with a scale per 32.
_FP8, _FP4, _BF16 = 1 + 1 / 1024, 0.5 + 1 / 32, 2.0
# The Engram tables of the released model: rows of both layers, and 256 e4m3 values with eight scales to a row. They
# stand here because a config may leave them out and still name its Engram layers.
_RELEASED_ENGRAM_ROWS, _ENGRAM_ROW_BYTES = (384006168, 384016682), 264


@dataclass(frozen=True)
class Weights:
    """Bytes over all ranks that are divided, bytes that every rank keeps, and where the figures come from."""

    split: float
    replicated: float
    engram: float
    source: str

    def per_gpu(self, tp: int, *, engram_on_gpu: bool) -> float:
        engram = self.engram / tp if engram_on_gpu else 0.0
        return self.split / tp + self.replicated + engram


def weights_of(settings: dict[str, Any], plan: LayerPlan, folder: Path | None) -> Weights:
    """The weights of a model.

    Args:
        settings: the text config.
        plan: its layers.
        folder: where its files may lie, or None.
    """
    estimate = _by_config(settings, plan)
    files = sorted(folder.glob("*.safetensors")) if folder is not None else []
    if not files:
        return estimate
    size = sum(path.stat().st_size for path in files)
    rest = max(size - estimate.replicated - estimate.engram, 0.0)
    return Weights(rest, estimate.replicated, estimate.engram, f"{len(files)} files")


def _by_config(settings: dict[str, Any], plan: LayerPlan) -> Weights:
    def size(field: str) -> int:
        value = settings.get(field)
        if not isinstance(value, int):
            raise ConfigError(field, value, "is needed to estimate the weights; or give them: --weights-gib")
        return value

    quantized = bool(settings.get("quantization_config"))
    linear = _FP8 if quantized else _BF16
    expert = _FP4 if settings.get("quantization_config", {}).get("expert_dtype") == "fp4" else linear
    hidden, config = size("hidden_size"), plan.config
    q_lora, o_width = size("q_lora_rank"), size("o_lora_rank") * size("o_groups")
    heads = config.num_attention_heads * config.head_dim
    split = replicated = 0.0
    for layer in plan.layers:
        # wq_b, wo_a, wo_b; then the experts.
        split += linear * (heads * q_lora + heads * size("o_lora_rank") + o_width * hidden)
        split += expert * 3 * hidden * size("moe_intermediate_size") * size("n_routed_experts")
        split += linear * 3 * hidden * size("moe_intermediate_size") * settings.get("n_shared_experts", 0)
        replicated += linear * hidden * (q_lora + config.head_dim) + _BF16 * hidden * size("n_routed_experts")
        # Hyper-connections of both sublayers, fp32.
        replicated += 2 * 4 * 24 * settings.get("hc_mult", 4) * hidden
        if layer.writes_cache:
            replicated += _BF16 * (config.head_dim * hidden * layer.ratio + config.index_head_dim * config.head_dim)
        if layer.chooses:
            replicated += linear * config.index_n_heads * config.index_head_dim * q_lora
            replicated += _BF16 * config.index_n_heads * hidden
    split += 2 * _BF16 * size("vocab_size") * hidden
    return Weights(split, replicated, _engram(settings), "estimated from the config")


def _engram(settings: dict[str, Any]) -> float:
    if not settings.get("engram_layer_ids"):
        return 0.0
    return float(sum(settings.get("engram_num_embeddings", _RELEASED_ENGRAM_ROWS)) * _ENGRAM_ROW_BYTES)
