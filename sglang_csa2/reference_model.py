"""A whole DeepSeek-V4.1 model in plain torch, from its checkpoint: what `verify` compares a server with.

Slow and readable, one sequence at a time, every row of every layer; it shares no code with the server, only
`reference` for the attention's steps. Roundings are those of the published code: bf16 linears, fp32 inside norms,
hyper-connections, router, experts' sum and head. Checkpoints in bf16 without Engram tables; others are refused.

    embed -> streams [n, hc, d], all alike
    per layer, for attention and then for the experts:
        x = norm(sum_k pre[k] streams[k])          pre: the previous sublayer's; at first, stream 0
        pre, post, comb = mix(streams)             this sublayer's; its pre is for the next one
        streams[i] = post[i] f(x) + sum_j comb[j, i] streams[j]
    logits = head(norm(sum_k pre[k] streams[k]))
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sglang_csa2 import reference
from sglang_csa2.config import Csa2Config
from sglang_csa2.layer_plan import LayerPlan, LayerSpec

# Rows that attention and index scores take at once: bounds the gathered keys to some hundred MB.
_TILE_ROWS = 128


class UnsupportedCheckpoint(ValueError):
    """A checkpoint that the plain model does not compute: names what it has and what to do."""


@dataclass
class Carried:
    """What layers hand to later layers for one sequence, by source layer id."""

    main: dict[int, Tensor] = field(default_factory=dict)  # bf16 [entries, 512], on the main KV grid
    index: dict[int, Tensor] = field(default_factory=dict)  # bf16 [entries, 128], on the index grid
    chosen: dict[int, Tensor] = field(default_factory=dict)  # int64 [n, topk], -1 padded
    pool: Tensor | None = None  # bool [n, entries], the candidate source's


class ReferenceModel:
    """The model of a folder with `config.json` and `*.safetensors`."""

    def __init__(self, folder: Path):
        raw = json.loads((folder / "config.json").read_text())
        self.settings: dict[str, Any] = raw | raw.get("text_config", {})
        _refuse(self.settings)
        self.plan = LayerPlan.from_config(Csa2Config.from_hf(raw))
        self.weights = _load(folder)

    @torch.inference_mode()
    def log_probabilities(self, input_ids: list[int]) -> tuple[Tensor, Carried]:
        """fp32 [n, vocabulary] log-probabilities after each position, and what the layers chose."""
        carried = Carried()
        positions = torch.arange(len(input_ids))
        streams = self.weights["embed.weight"][input_ids][:, None].expand(-1, self.settings["hc_mult"], -1)
        pre = None
        for spec in self.plan.layers:
            name = f"layers.{spec.layer_id}"

            def attend(x: Tensor, name: str = name, spec: LayerSpec = spec) -> Tensor:
                return self._attention(f"{name}.attn", spec, x, positions, carried)

            def experts(x: Tensor, name: str = name) -> Tensor:
                return self._experts(f"{name}.ffn", x)

            streams, pre = self._sublayer(name, "attn", streams, pre, attend)
            streams, pre = self._sublayer(name, "ffn", streams, pre, experts)
        x = self._norm("norm", _combine(streams, pre))
        logits = x.float() @ self.weights["head.weight"].float().T
        return logits.log_softmax(-1), carried

    def greedy(self, input_ids: list[int], steps: int) -> list[int]:
        """The greedy continuation, recomputing everything at each step."""
        ids = list(input_ids)
        for _ in range(steps):
            ids.append(int(self.log_probabilities(ids)[0][-1].argmax()))
        return ids[len(input_ids) :]

    # Hyper-connections ---------------------------------------------------------

    def _sublayer(
        self, name: str, kind: str, streams: Tensor, pre: Tensor | None, compute: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        x = self._norm(f"{name}.{kind}_norm", _combine(streams, pre))
        next_pre, post, comb = self._mix(f"{name}.hc_{kind}", streams)
        kept = torch.einsum("nji,njd->nid", comb, streams.float())
        return (post[..., None] * compute(x).float()[:, None] + kept).bfloat16(), next_pre

    def _mix(self, name: str, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """pre, post fp32 [n, hc]; comb fp32 [n, hc, hc], made doubly stochastic by Sinkhorn's iteration."""
        hc, eps = self.settings["hc_mult"], self.settings["hc_eps"]
        flat = streams.flatten(1).float()
        normed = torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.settings["rms_norm_eps"])
        mixed = (flat @ self.weights[f"{name}_fn"].T) * normed
        scale, base = self.weights[f"{name}_scale"], self.weights[f"{name}_base"]
        pre = (mixed[:, :hc] * scale[0] + base[:hc]).sigmoid() + eps
        post = 2 * (mixed[:, hc : 2 * hc] * scale[1] + base[hc : 2 * hc]).sigmoid()
        comb = (mixed[:, 2 * hc :] * scale[2] + base[2 * hc :]).unflatten(-1, (hc, hc)).softmax(-1) + eps
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
        for _ in range(self.settings["hc_sinkhorn_iters"] - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + eps)
            comb = comb / (comb.sum(-2, keepdim=True) + eps)
        return pre, post, comb

    # Attention (spec 2) ----------------------------------------------------------

    def _attention(self, name: str, spec: LayerSpec, x: Tensor, positions: Tensor, carried: Carried) -> Tensor:
        table = self._rope(spec.ratio, positions)
        q_lora = self._norm(f"{name}.q_norm", self._linear(f"{name}.wq_a", x))
        heads = self._linear(f"{name}.wq_b", q_lora).unflatten(-1, (-1, self.plan.config.head_dim))
        q = reference.rotate_tail(heads, table)
        kv = reference.rotate_tail(self._norm(f"{name}.kv_norm", self._linear(f"{name}.wkv", x)), table)
        keys = reference.quantize_swa_kv(kv)
        listed = reference.window_indices(positions, self.plan.config.sliding_window)
        if spec.writes_cache:
            self._compress(name, spec, x, carried)
        if spec.chooses:
            self._choose(f"{name}.indexer", spec, x, q_lora, positions, carried)
        if spec.kv_source is not None and spec.index_source is not None:
            chosen = carried.chosen[spec.index_source]
            listed = torch.cat([listed, torch.where(chosen >= 0, chosen + len(keys), -1)], dim=1)
            keys = torch.cat([keys, carried.main[spec.kv_source]])
        sink, scale = self.weights[f"{name}.attn_sink"], self.plan.config.head_dim**-0.5
        tiles = zip(q.split(_TILE_ROWS), listed.split(_TILE_ROWS), strict=True)
        out = torch.cat([reference.sparse_attention(rows, keys, some, sink, scale) for rows, some in tiles])
        out = reference.rotate_tail(out.bfloat16(), table, inverse=True)
        groups = self.settings["o_groups"]
        grouped = out.flatten(1).unflatten(-1, (groups, -1))
        narrow = torch.einsum("ngd,grd->ngr", grouped, self.weights[f"{name}.wo_a.weight"].unflatten(0, (groups, -1)))
        return self._linear(f"{name}.wo_b", narrow.flatten(1))

    def _compress(self, name: str, spec: LayerSpec, x: Tensor, carried: Carried) -> None:
        """A Full layer's entries; an odd last token waits for its partner and makes none."""
        entries = len(x) // spec.ratio
        if spec.ratio == 2:
            kv, score = (
                x.float() @ self.weights[f"{name}.compressor.{part}.weight"].float().T for part in ("wkv", "wgate")
            )
            pairs = [part[: 2 * entries].unflatten(0, (entries, 2)) for part in (kv, score)]
            pooled = reference.pool_pairs(*pairs).bfloat16()
        else:
            pooled = self._linear(f"{name}.compressor.wkv", x)
        latent = self._norm(f"{name}.compressor.norm", pooled)
        table = self._rope(spec.ratio, torch.arange(entries) * spec.ratio)
        carried.main[spec.layer_id] = reference.quantize_main_kv(reference.rotate_tail(latent, table))
        key = self._norm(f"{name}.indexer.k_norm", self._linear(f"{name}.indexer.wk", latent))
        carried.index[spec.layer_id] = reference.quantize_index(reference.rotate_tail(key, table))

    def _choose(
        self, name: str, spec: LayerSpec, x: Tensor, q_lora: Tensor, positions: Tensor, carried: Carried
    ) -> None:
        config = self.plan.config
        heads = self._linear(f"{name}.wq_b", q_lora).unflatten(-1, (config.index_n_heads, config.index_head_dim))
        q = reference.quantize_index(reference.rotate_tail(heads, self._rope(spec.ratio, positions)))
        factor = (config.index_head_dim * config.index_n_heads) ** -0.5
        weights = self._linear(f"{name}.weights_proj", x) * factor
        assert spec.kv_source is not None
        keys = carried.index[spec.kv_source]
        tiles = zip(q.split(_TILE_ROWS), weights.split(_TILE_ROWS), strict=True)
        scores = torch.cat([reference.index_scores(rows, keys, some) for rows, some in tiles])
        visible = reference.visible_entries(positions, spec.ratio)
        eligible = carried.pool if spec.uses_candidates else None
        carried.chosen[spec.layer_id] = reference.select_topk(scores, visible, config.index_topk, eligible)
        if spec.is_candidate_source:
            carried.pool = reference.candidate_mask(
                scores, visible, config.candidate_topk_blocks, config.candidate_block_size
            )

    def _rope(self, ratio: int, positions: Tensor) -> Tensor:
        scaling = self.settings["rope_scaling"]
        yarn = reference.Yarn(
            factor=scaling["factor"],
            original_max_position=scaling["original_max_position_embeddings"],
            beta_fast=scaling["beta_fast"],
            beta_slow=scaling["beta_slow"],
        )
        base = self.settings["compress_rope_theta" if ratio else "rope_theta"]
        width = self.plan.config.qk_rope_head_dim
        return reference.rope_table(positions, reference.rope_frequencies(width, base, yarn if ratio else None))

    # Experts ------------------------------------------------------------------

    def _experts(self, name: str, x: Tensor) -> Tensor:
        """Routed experts weighted before their down projection, the shared one after; summed in fp32."""
        affinity = functional.softplus(x.float() @ self.weights[f"{name}.gate.weight"].float().T).sqrt()
        ranked = affinity + self.weights[f"{name}.gate.bias"]
        chosen = ranked.topk(self.settings["num_experts_per_tok"], dim=-1).indices
        weights = affinity.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * self.settings["routed_scaling_factor"]
        out = torch.zeros(x.shape, dtype=torch.float32)
        for expert in range(self.settings["n_routed_experts"]):
            rows, choice = (chosen == expert).nonzero(as_tuple=True)
            if len(rows):
                hidden = self._gated(f"{name}.experts.{expert}", x[rows]) * weights[rows, choice, None]
                out[rows] += self._linear(f"{name}.experts.{expert}.w2", hidden.bfloat16()).float()
        shared = self._gated(f"{name}.shared_experts", x).bfloat16()
        return (out + self._linear(f"{name}.shared_experts.w2", shared).float()).bfloat16()

    def _gated(self, name: str, x: Tensor) -> Tensor:
        limit = self.settings["swiglu_limit"]
        gate, up = (self._linear(f"{name}.{part}", x).float() for part in ("w1", "w3"))
        return functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)

    # Parts --------------------------------------------------------------------

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"].bfloat16())

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return reference.rms_norm(x, self.weights[f"{name}.weight"], self.settings["rms_norm_eps"])


def _combine(streams: Tensor, pre: Tensor | None) -> Tensor:
    """bf16 [n, d]: the streams weighted by `pre`; before the first sublayer they are all alike."""
    if pre is None:
        return streams[:, 0]
    return (streams.float() * pre[..., None]).sum(1).bfloat16()


def _refuse(settings: dict[str, Any]) -> None:
    if settings.get("quantization_config"):
        raise UnsupportedCheckpoint(
            f"quantization_config is {settings['quantization_config'].get('quant_method')!r}: the plain model computes "
            "bf16 checkpoints only; compare with a recording instead (verify --record, then verify --against)"
        )
    if settings.get("engram_layer_ids"):
        raise UnsupportedCheckpoint(
            f"engram_layer_ids is {settings['engram_layer_ids']}: the plain model has no Engram tables; "
            "compare with a recording instead (verify --record, then verify --against)"
        )


def _load(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UnsupportedCheckpoint(
            f"{folder} holds no *.safetensors; the tiny models' are drawn by scripts/make_tiny_checkpoint.py {folder}"
        )
    return {name: tensor for path in files for name, tensor in load_file(path).items()}
