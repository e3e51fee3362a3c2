"""[host] The ledger: every change that a csa2 run makes to the host, one entry each.

Installed in the scheduler process of a csa2 run, and only there: with another backend the host is left as it is.
Each entry says what it changes, why, and when it can go. `install` applies them through the host's own
`HookRegistry`; that logs failures instead of raising, so `missing` is asked afterwards by the backend.

All devices:

    select_dsv4_kv_layout                 why: the host allows 528/288-byte records on SM100 only, csa2's flag
                                          chooses between two layouts, and the host's memory budget
                                          and its pool both ask this function
                                          until: the host lets a backend name its layout
    KVCacheConfigurator._build_dsv4_kv_pool   why: the pool class is a name in that module
                                          until: the host asks the backend for its pool
    MqaAttentionBase._kernel_num_heads    why: the host pads heads to 64 for FlashMLA under TP
                                          until: padding is the backend's

CPU only, because the host's function is for GPUs (until it has a torch form):

    fused_rope_inplace, hc_split_sinkhorn, mhc_combine, silu_and_mul_clamp
    get_rope_wrapper                      why: asserts another rope type; only V4's ratio-4 layers use the result

CPU only, because the host's CPU form is not what its GPU form and the published code compute (until it is):

    moe_forward_native                    why: ignores swiglu_limit, rounds each expert to bf16
    maybe_fuse_routed_scale_and_shared_add   why: rounds the experts' sum twice
    MoEGate.forward                       why: rounds router logits to bf16
    NonCudaDecoderMixin.bind_next         why: registers each layer inside the one before it, so that weight updates
                                          find no parameters
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

from sglang.srt.environ import envs
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

from sglang_csa2.patches import cpu, heads, memory


@dataclass(frozen=True)
class Patch:
    """One change: a dotted host target, how it is hooked, and with what."""

    target: str
    how: HookType
    hook: Callable
    cpu_only: bool = False

    def is_applied(self) -> bool:
        owner, _, name = self.target.rpartition(".")
        hooks = [hook for _, hook, _ in HookRegistry._hooks.get(self.target, [])]
        return self.hook in hooks and hasattr(getattr(pkgutil.resolve_name(owner), name), "__wrapped__")


# How the host's log names the origin of a hook.
_SOURCE = HookSource(plugin_name="csa2", dist_name="sglang-csa2")
_POOL = "sglang.srt.mem_cache.deepseek_v4_memory_pool"
_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_MODEL = "sglang.srt.models.deepseek_v4"
_MHC = "sglang.kernels.ops.layernorm.mhc"

LEDGER = (
    Patch(f"{_POOL}.select_dsv4_kv_layout", HookType.AROUND, memory.select_layout),
    Patch(f"{_CONFIGURATOR}._build_dsv4_kv_pool", HookType.AROUND, memory.build_pool),
    Patch(f"{_MODEL}.MqaAttentionBase._kernel_num_heads", HookType.REPLACE, heads.kernel_num_heads),
    Patch("sglang.srt.layers.rotary_embedding.factory.get_rope_wrapper", HookType.AROUND, cpu.rope_wrapper, True),
    Patch("sglang.kernels.ops.attention.dsv4.norm_rope.fused_rope_inplace", HookType.AROUND, cpu.rope_inplace, True),
    Patch(f"{_MHC}.hc_split_sinkhorn", HookType.AROUND, cpu.split_sinkhorn, True),
    Patch(f"{_MHC}.mhc_combine", HookType.AROUND, cpu.mhc_combine, True),
    Patch(
        "sglang.kernels.ops.activation.silu_and_mul_clamp.silu_and_mul_clamp",
        HookType.AROUND,
        cpu.silu_and_mul_clamp,
        True,
    ),
    Patch("sglang.srt.layers.moe.fused_moe_native.moe_forward_native", HookType.AROUND, cpu.moe_forward, True),
    Patch(
        "sglang.srt.layers.quantization.mxfp4_flashinfer_trtllm_moe.maybe_fuse_routed_scale_and_shared_add",
        HookType.AROUND,
        cpu.merge_experts,
        True,
    ),
    Patch(
        "sglang.srt.models.deepseek_v4_platform_stage.NonCudaDecoderMixin.bind_next",
        HookType.AFTER,
        cpu.bind_next,
        True,
    ),
    Patch("sglang.srt.models.deepseek_v2.MoEGate.forward", HookType.AROUND, cpu.gate_forward, True),
)


def entries(device: str) -> tuple[Patch, ...]:
    """The ledger's entries for a device ("cpu", "cuda")."""
    return tuple(patch for patch in LEDGER if device == "cpu" or not patch.cpu_only)


def install(device: str) -> None:
    """Apply the ledger in this process. Idempotent; resolving a target imports its host module."""
    for patch in entries(device):
        if not patch.is_applied():
            HookRegistry.register(patch.target, patch.hook, patch.how, source=_SOURCE)
    HookRegistry.apply_hooks()
    if device == "cpu":
        cpu.choose_torch_paths()
    else:
        # Row-bucket graphs of the late layers call the host's own backend for their metadata.
        envs.SGLANG_DSV4_DECODER_TAIL_GRAPH_MAX_ROWS.set(0)


def missing(device: str) -> list[str]:
    """Targets of the ledger that did not take effect in this process."""
    return [patch.target for patch in entries(device) if not patch.is_applied()]
