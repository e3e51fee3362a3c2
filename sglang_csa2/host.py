"""The host symbols that csa2 relies on, and the check that they are what it was written against.

One table: where a symbol is, how it is used, its parameters. The check reads the host's source with `ast`, so it
imports none of the heavy modules it speaks of, and it runs before anything is registered or loaded. A mismatch is
a `HostMismatch` that says what differs, which versions are supported and what to do.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path

SUPPORTED_VERSIONS = ("0.5.23",)

# The name users type.
BACKEND_NAME = "csa2"
# The host's class for every DeepSeek-V4 family model, and the config type that marks V4.1.
MODEL_ARCHITECTURE = "DeepseekV4ForCausalLM"
MODEL_TYPE = "deepseek_v41"


class HostMismatch(RuntimeError):
    """The installed SGLang is not one that csa2 was checked against."""


@dataclass(frozen=True)
class HostSymbol:
    """A host name, `module:qualname`; `parameters` in order, or None for a name that is not a function."""

    path: str
    use: str
    parameters: str | None = None


_POOL = "sglang.srt.mem_cache.deepseek_v4_memory_pool"
_BACKEND = "sglang.srt.layers.attention.deepseek_v4_backend"
_MODEL = "sglang.srt.models.deepseek_v4"
_ALLOCATOR = "sglang.srt.mem_cache.allocator.swa:SWATokenToKVPoolAllocator"
_SPARSE = "sglang.srt.layers.attention.dsv4.dsv41_sparse"

HOST_SYMBOLS = (
    # Registration
    HostSymbol("sglang.srt.arg_groups.choices:add_attention_backend_choices", "extended with csa2"),
    HostSymbol(
        "sglang.srt.arg_groups.model_override_base:register_model_override_predicate",
        "registers the override that keeps csa2 and refuses",
        "predicate",
    ),
    HostSymbol(
        "sglang.srt.layers.attention.attention_registry:register_attention_backend", "registers the backend", "name"
    ),
    HostSymbol(
        "sglang.srt.plugins.hook_registry:HookRegistry.register",
        "applies the ledger",
        "cls, target, hook, hook_type, source",
    ),
    HostSymbol("sglang.srt.plugins.hook_registry:HookRegistry.apply_hooks", "applies the ledger", "cls"),
    HostSymbol("sglang.srt.plugins.hook_registry:HookRegistry._hooks", "asked whether an entry took effect"),
    HostSymbol(
        "sglang.srt.managers.scheduler:Scheduler.__init__",
        "hooked: a csa2 run installs the ledger before it",
        "self, server_args, port_args",
    ),
    HostSymbol("sglang.srt.runtime_context:attention_backends", "read: the resolved backends", ""),
    HostSymbol("sglang.srt.runtime_context:get_exec", "read: whether bounded replay is on", ""),
    HostSymbol("sglang.srt.runtime_context:get_device", "read: the resolved device", ""),
    HostSymbol("sglang.srt.runtime_context:get_observability", "read: whether metrics are on", ""),
    HostSymbol("sglang.srt.runtime_context:get_parallel", "read: whether this rank reports metrics", ""),
    HostSymbol(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner:build_replay_fb_view",
        "read: a replay's num_padding, for the metrics",
        "forward_batch, buffers, bs, raw_bs, num_tokens, global_num_tokens_cpu, seq_len_fill_value, "
        "capture_forward_mode, is_encoder_decoder",
    ),
    HostSymbol(
        "sglang.srt.mem_cache.memory_pool:ReqToTokenPool.free_rows",
        "wrapped under SGLANG_CSA2_CHECK: request slots that are given back",
        "self, indices",
    ),
    HostSymbol(f"{_ALLOCATOR}.full_available_size", "read: used KV for the metrics", "self"),
    HostSymbol(f"{_ALLOCATOR}.swa_available_size", "read: used window KV for the metrics", "self"),
    HostSymbol(
        "sglang.srt.arg_groups.model_override_base:resolving_view", "read: the device resolved so far", "server_args"
    ),
    # Pool and budget
    HostSymbol(
        f"{_POOL}:DeepSeekV4TokenToKVPool._make_indexer_pool",
        "overridden: pins the index-K page",
        "self, size, page_size, dtype, index_head_dim, layer_num, device, enable_memory_saver, force_fp4, "
        "global_page_size, index_k_page8",
    ),
    HostSymbol(f"{_POOL}:select_dsv4_kv_layout", "hooked: csa2's layout", ""),
    HostSymbol(f"{_POOL}:DeepSeekV4SingleKVPool", "read: pages of one ratio's buffers"),
    HostSymbol(f"{_POOL}:DeepSeekV4LayerItem", "read: a layer's compressed buffer"),
    HostSymbol(f"{_POOL}:DeepSeekV4TokenToKVPool.get_ring_size", "read: the pending ring", "self, compress_ratio"),
    HostSymbol("sglang.kernels.ops.attention.dsv4.kv_layout:KVLayout.V41_NEW", "the 528-byte record"),
    HostSymbol("sglang.kernels.ops.attention.dsv4.kv_layout:KVLayout.V41_FP4_NEW", "the 288-byte record"),
    HostSymbol("sglang.kernels.ops.attention.dsv4.kv_layout:KVLayout.V4", "the 584-byte record"),
    HostSymbol(
        "sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator._build_dsv4_kv_pool",
        "hooked: csa2's pool class for the target model",
        "self, max_running_requests, full_max_total_num_tokens, swa_max_total_num_tokens, c4_max_total_num_tokens, "
        "c128_max_total_num_tokens, c4_state_pool_size, c128_state_pool_size, c4_state_dtype, c128_state_dtype, "
        "req_to_token_pool",
    ),
    HostSymbol("sglang.srt.model_executor.pool_configurator:DSV4PoolConfigurator", "its budget asks our layout"),
    # Model and backend
    HostSymbol(f"{_MODEL}:MqaAttentionBase._kernel_num_heads", "hooked: no head padding", "self, num_tokens"),
    HostSymbol(f"{_MODEL}:MqaAttentionBase._local_attn_sink", "gives the sink per head", "self, kernel_num_heads"),
    HostSymbol(f"{_BACKEND}:LateLayerTail", "built: the rows of the late layers under decoder SWA bounded replay"),
    HostSymbol(f"{_BACKEND}:late_layer_whole_extend", "which requests keep a whole tail", "forward_batch, dspark"),
    HostSymbol(f"{_BACKEND}:late_layer_num_tokens", "rows of the tail", "forward_batch, dspark"),
    HostSymbol(
        "sglang.kernels.ops.attention.dsv4.attn_metadata_kernels:late_layer_tail_layout",
        "which rows are in the tail",
        "extend_lens_cpu, seq_lens_cpu, tail_len, device, whole_extend",
    ),
    HostSymbol(
        f"{_BACKEND}:DeepseekV4AttnBackend.forward_low_ratio_sources",
        "same contract as ours",
        "self, layer, x, q_lora, positions, forward_batch, run_compressor, run_indexer",
    ),
    HostSymbol(
        f"{_BACKEND}:DeepseekV4AttnBackend.write_tail_source_kv",
        "same contract as ours",
        "self, layer, x, positions, forward_batch",
    ),
    HostSymbol(
        f"{_BACKEND}:DeepseekV4AttnBackend.enter_late_layer_tail", "same contract as ours", "self, forward_batch"
    ),
    HostSymbol(
        f"{_BACKEND}:DeepseekV4AttnBackend.exit_late_layer_tail", "same contract as ours", "self, saved, forward_batch"
    ),
    HostSymbol(f"{_SPARSE}:DeepseekV41Compressor.project", "called: kv and score", "self, x"),
    HostSymbol(f"{_SPARSE}:DeepseekV41Indexer.queries", "called: index queries", "self, q_lora, freqs, positions"),
    HostSymbol(f"{_SPARSE}:DeepseekV41Indexer.head_weights", "called: head weights", "self, x"),
    HostSymbol(f"{_SPARSE}:DeepseekV41Indexer.forward_wk", "called: index keys", "self, latent"),
    # CPU forms
    HostSymbol(
        "sglang.kernels.ops.attention.dsv4.norm_rope:fused_rope_inplace",
        "hooked on CPU",
        "q, k, freqs_cis, positions, inverse",
    ),
    HostSymbol(
        "sglang.kernels.ops.layernorm.mhc:hc_split_sinkhorn",
        "hooked on CPU",
        "mixes, hc_scale, hc_base, hc_mult, sinkhorn_iters, eps",
    ),
    HostSymbol("sglang.kernels.ops.layernorm.mhc:mhc_combine", "hooked on CPU", "x_flat, pre, hc, out_dtype"),
    HostSymbol(
        "sglang.kernels.ops.activation.silu_and_mul_clamp:silu_and_mul_clamp",
        "hooked on CPU",
        "input, output, swiglu_limit",
    ),
    HostSymbol(
        "sglang.srt.layers.moe.fused_moe_native:moe_forward_native",
        "hooked on CPU",
        "layer, x, topk_output, moe_runner_config",
    ),
    HostSymbol(
        "sglang.srt.layers.quantization.mxfp4_flashinfer_trtllm_moe:maybe_fuse_routed_scale_and_shared_add",
        "hooked on CPU",
        "experts, routed, shared, routed_scaling_factor",
    ),
    HostSymbol(
        "sglang.srt.models.deepseek_v4_platform_stage:NonCudaDecoderMixin.bind_next",
        "hooked on CPU",
        "self, next_layer",
    ),
    HostSymbol(
        "sglang.srt.models.deepseek_v2:MoEGate.forward",
        "hooked on CPU",
        "self, hidden_states, gemm_output_zero_allocator, forward_batch",
    ),
    HostSymbol(
        "sglang.srt.layers.rotary_embedding.factory:get_rope_wrapper",
        "hooked on CPU",
        "head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, dtype, partial_rotary_factor, device",
    ),
)


def installed_version() -> str:
    return importlib.metadata.version("sglang")


def check_version() -> None:
    """Raises HostMismatch when the installed SGLang is not a supported version."""
    version = installed_version()
    if version not in SUPPORTED_VERSIONS:
        raise HostMismatch(_refusal(f"sglang {version} is installed, which csa2 has not been checked against"))


def check_symbols(symbols: tuple[HostSymbol, ...] = HOST_SYMBOLS) -> None:
    """Raises HostMismatch, listing every symbol that is absent or has other parameters."""
    if found := differences(symbols):
        raise HostMismatch(_refusal("the installed sglang differs: " + "; ".join(found)))


def differences(symbols: tuple[HostSymbol, ...] = HOST_SYMBOLS) -> list[str]:
    """What the installed SGLang lacks or has otherwise, one text per symbol."""
    return [difference for symbol in symbols if (difference := _difference(symbol))]


def _refusal(what: str) -> str:
    return (
        f"csa2 cannot serve: {what}. Supported: sglang {', '.join(SUPPORTED_VERSIONS)}. "
        f"Install one of them (pip install sglang=={SUPPORTED_VERSIONS[-1]}), or choose another --attention-backend."
    )


def _difference(symbol: HostSymbol) -> str | None:
    module, _, qualname = symbol.path.partition(":")
    node = _find(module, qualname)
    if node is None:
        return f"{symbol.path} does not exist ({symbol.use})"
    if symbol.parameters is None:
        return None
    found = _parameters(node)
    if found != symbol.parameters:
        return f"{symbol.path} takes ({found}), expected ({symbol.parameters}) ({symbol.use})"
    return None


def _find(module: str, qualname: str) -> ast.AST | None:
    scope: ast.AST | None = _module_tree(module)
    for name in qualname.split("."):
        scope = None if scope is None else _child(scope, name)
    return scope


def _child(scope: ast.AST, name: str) -> ast.AST | None:
    for node in getattr(scope, "body", ()):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return node
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return node
    return None


def _parameters(node: ast.AST) -> str:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return "not a function"
    args = node.args
    return ", ".join(arg.arg for arg in [*args.posonlyargs, *args.args, *args.kwonlyargs])


@functools.cache
def _module_tree(module: str) -> ast.Module | None:
    package = importlib.util.find_spec("sglang")
    if package is None or not package.submodule_search_locations:
        return None
    path = Path(package.submodule_search_locations[0], *module.split(".")[1:])
    for source in (path.with_suffix(".py"), path / "__init__.py"):
        if source.is_file():
            return ast.parse(source.read_text(encoding="utf-8"))
    return None
