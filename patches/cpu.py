"""[host] CPU forms of the host functions that the stock model calls and that exist for GPUs only.

Each takes the original first and hands over to it when the tensors are not on the CPU. They are the model's own
arithmetic (rotary embedding, hyper-connections, the clamped SwiGLU), restated in torch with fp32 inside.
"""

from __future__ import annotations

import os

import torch
from sglang.srt.environ import envs
from torch import Tensor
from torch.nn import functional


def choose_torch_paths() -> None:
    """Turn the host's switches away from tilelang, and oneDNN to one instruction set.

    oneDNN's bf16 GEMMs sum in another order with each instruction set. AVX2 is on every x86 server and laptop, so a
    model gives the same tokens on all of them, and it is the closest to exact sums of those tried on the golden
    values (mean difference 0.027, against 0.032 with AVX-512). Set ONEDNN_MAX_CPU_ISA to choose otherwise. It is
    read at oneDNN's first use, which comes after this.
    """
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
    envs.SGLANG_OPT_USE_TILELANG_MHC_PRE.set(False)
    envs.SGLANG_OPT_USE_TILELANG_MHC_POST.set(False)


def rope_wrapper(original, *args, **kwargs):
    """No rotary module on the CPU: V4.1's layers rotate by their own table."""
    return original(*args, **kwargs) if kwargs.get("device") != "cpu" else None


def rope_inplace(original, q: Tensor, k: Tensor | None, freqs_cis: Tensor, positions: Tensor, inverse: bool = False):
    if q.device.type != "cpu":
        return original(q, k, freqs_cis, positions, inverse)
    table = freqs_cis[positions]
    table = table.conj() if inverse else table
    for x in (q, k):
        if x is not None:
            pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
            x.copy_(torch.view_as_real(pairs * table[:, None, :]).flatten(-2))
    return None


def split_sinkhorn(
    original,
    mixes: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    hc_mult: int = 4,
    sinkhorn_iters: int = 20,
    eps: float = 1e-6,
):
    """mixes fp32 [b, s, (2 + hc) * hc] -> pre, post [b, s, hc] and a doubly normalised comb [b, s, hc, hc]."""
    if mixes.device.type != "cpu":
        return original(mixes, hc_scale, hc_base, hc_mult, sinkhorn_iters, eps)
    sizes = [hc_mult, hc_mult, hc_mult * hc_mult]
    parts = zip(mixes.split(sizes, dim=-1), hc_scale, hc_base.split(sizes), strict=True)
    pre, post, comb = (part * scale + base for part, scale, base in parts)
    comb = comb.unflatten(-1, (hc_mult, hc_mult)).softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(sinkhorn_iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return pre.sigmoid() + eps, 2 * post.sigmoid(), comb


def mhc_combine(original, x_flat: Tensor, pre: Tensor, hc: int, out_dtype: torch.dtype) -> Tensor:
    """sum_k pre[m, k] x[m, k, :]: x_flat [m, hc * d], pre fp32 [m, hc] -> [m, d]."""
    if x_flat.device.type != "cpu":
        return original(x_flat, pre, hc, out_dtype)
    streams = x_flat.float().unflatten(-1, (hc, -1))
    return (streams * pre[..., None]).sum(1).to(out_dtype)


def silu_and_mul_clamp(original, input: Tensor, output: Tensor, swiglu_limit: float) -> None:
    if input.device.type != "cpu":
        return original(input, output, swiglu_limit)
    output.copy_(_clamped_swiglu(input, swiglu_limit))
    return None


def moe_forward(original, layer, x: Tensor, topk_output, moe_runner_config) -> Tensor:
    """Routed experts with the clamped SwiGLU, unrounded (fp32); anything else goes to the host's own loop."""
    limit = moe_runner_config.swiglu_limit
    if x.device.type != "cpu" or not limit:
        return original(layer, x, topk_output, moe_runner_config)
    if moe_runner_config.activation != "silu" or moe_runner_config.apply_router_weight_on_input:
        raise NotImplementedError(
            f"swiglu_limit={limit} on the CPU is served for silu experts with output weighting only, not "
            f"activation={moe_runner_config.activation!r}"
        )
    if layer.w13_weight.shape[0] != layer.num_experts:
        raise NotImplementedError(
            f"{layer.w13_weight.shape[0]} of {layer.num_experts} experts are on this rank: on the CPU all must be"
        )
    weights, experts, _ = topk_output
    # The published code weights an expert, routed scale included, before its down projection and sums experts in
    # fp32. The host scales the sum afterwards, so it is handed over unscaled.
    scale = moe_runner_config.routed_scaling_factor or 1.0
    weights = weights.float() * scale
    out = torch.zeros(x.shape, dtype=torch.float32)
    for expert in range(layer.num_experts):
        rows, choice = (experts == expert).nonzero(as_tuple=True)
        if rows.numel():
            hidden = _clamped_swiglu(functional.linear(x[rows], layer.w13_weight[expert]), limit)
            hidden = (hidden * weights[rows, choice, None]).to(x.dtype)
            out.index_add_(0, rows, functional.linear(hidden, layer.w2_weight[expert]).float())
    return out / scale


def merge_experts(original, experts, routed: Tensor, shared: Tensor | None, routed_scaling_factor: float) -> Tensor:
    """Round the sum of routed (fp32 from `moe_forward`) and shared experts once, as the published code does."""
    merged = original(experts, routed, shared, routed_scaling_factor)
    return merged.bfloat16() if merged.device.type == "cpu" and merged.dtype == torch.float32 else merged


def gate_forward(original, self, hidden_states: Tensor, *args, **kwargs) -> Tensor:
    """Router logits in fp32, as on CUDA and in the published code; the host's CPU form rounds them to bf16."""
    if hidden_states.device.type != "cpu":
        return original(self, hidden_states, *args, **kwargs)
    return functional.linear(hidden_states.float(), self.weight.float())


def bind_next(result, self, next_layer) -> None:
    """Keep the neighbour as a plain attribute: as a submodule it renames every parameter of the later layers, and
    a weight update no longer finds them."""
    del result, next_layer
    neighbour = self._modules.pop("_next_layer", None)
    if neighbour is not None:
        self.__dict__["_next_layer"] = neighbour


def _clamped_swiglu(gate_up: Tensor, limit: float) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
