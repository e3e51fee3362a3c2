"""What csa2 does not serve: one table of settings, each with its reason and remedy.

Evaluated by the override provider, before weights load. A refusal is one message that says what was asked, why it
cannot be served and what to do; nothing is changed in silence and no other backend is chosen instead. Settings
are read with `getattr`, as the user gave them, so the table needs no host import.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_csa2 import envs, routes
from sglang_csa2.host import BACKEND_NAME, MODEL_ARCHITECTURE, MODEL_TYPE
from sglang_csa2.layout import PAGE_TOKENS


class Refused(ValueError):
    """A setting that csa2 does not serve."""


@dataclass(frozen=True)
class Request:
    """What the user asked for: the server arguments, the model's config, the device it resolves to, the environment."""

    args: Any
    hf_config: Any
    device: str
    env: Mapping[str, str]
    machine: routes.Machine

    def arg(self, name: str) -> Any:
        return getattr(self.args, name, None)


@dataclass(frozen=True)
class Refusal:
    """`asked` returns what the user set, as text, or None where the row does not apply."""

    setting: str
    asked: Callable[[Request], str | None]
    reason: str
    remedy: str

    def message(self, request: Request) -> str | None:
        asked = self.asked(request)
        return asked and f"csa2 does not serve {asked}: {self.reason}. {self.remedy}."


def check(
    args: Any,
    hf_config: Any,
    device: str,
    env: Mapping[str, str] = os.environ,
    machine: routes.Machine | None = None,
) -> None:
    """Raises Refused with every row that applies, one line each. machine: the one at hand unless given."""
    request = Request(args, hf_config, device, env, machine or routes.Machine.here(device))
    messages = [message for refusal in REFUSALS if (message := refusal.message(request))]
    if messages:
        raise Refused("\n".join(messages))


def _flag(name: str, *harmless: Any) -> Callable[[Request], str | None]:
    """The row applies when the argument is anything but None, False, an empty value or a harmless one."""

    def asked(request: Request) -> str | None:
        value = request.arg(name)
        if not value or value in harmless:
            return None
        option = "--" + name.replace("_", "-")
        return option if value is True else f"{option} {value}"

    return asked


def _either(*rows: Callable[[Request], str | None]) -> Callable[[Request], str | None]:
    return lambda request: ", ".join(filter(None, (row(request) for row in rows))) or None


def _any_flag(*names: str) -> Callable[[Request], str | None]:
    return _either(*(_flag(name) for name in names))


def _above_one(name: str) -> Callable[[Request], str | None]:
    return _flag(name, 1)


def _env(name: str, *harmless: str) -> Callable[[Request], str | None]:
    def asked(request: Request) -> str | None:
        value = request.env.get(name)
        return None if value is None or value.strip().lower() in harmless else f"{name}={value}"

    return asked


def _architecture(request: Request) -> str | None:
    architectures = list(getattr(request.hf_config, "architectures", None) or ["none"])
    model_type = getattr(request.hf_config, "model_type", None)
    if architectures[0] == MODEL_ARCHITECTURE and model_type == MODEL_TYPE:
        return None
    return f"the model architecture {architectures[0]} (model_type {model_type})"


def _mixed_backends(request: Request) -> str | None:
    base, prefill, decode = (
        request.arg(name) for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    )
    pair = (prefill or base, decode or base)
    return None if pair == (BACKEND_NAME, BACKEND_NAME) else f"prefill through {pair[0]} with decode through {pair[1]}"


def _device(request: Request) -> str | None:
    return None if request.device in ("cpu", "cuda") else f"--device {request.device}"


def _prefill_graphs(request: Request) -> str | None:
    backend = request.arg("cuda_graph_backend_prefill")
    if backend not in (None, "disabled"):
        return f"--cuda-graph-backend-prefill {backend}"
    # A dict from the command line, the host's own type from Python.
    backend = _member(_member(request.arg("cuda_graph_config"), "prefill"), "backend")
    return None if backend in (None, "disabled") else f"--cuda-graph-config with prefill backend {backend}"


def _member(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _fp8_on_cpu(request: Request) -> str | None:
    quantization = getattr(request.hf_config, "quantization_config", None) or {}
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
    asked = request.arg("quantization") or method
    if asked == "unquant":
        return None
    return f"{asked} weights on the CPU" if asked and request.device == "cpu" else None


def _value(read: Callable[[Mapping[str, str]], Any]) -> Callable[[Request], str | None]:
    """The row applies when a flag of csa2's own has a value that it does not take."""

    def asked(request: Request) -> str | None:
        try:
            read(request.env)
        except envs.EnvError as error:
            return str(error).partition(":")[0].replace(" is ", "=", 1)
        return None

    return asked


def _route(problem: Callable[[routes.Machine, routes.Flags], str | None]) -> Callable[[Request], str | None]:
    """The row applies when flags ask for a route that the machine or the layout does not have."""

    def asked(request: Request) -> str | None:
        try:
            return problem(request.machine, routes.Flags.from_env(request.env))
        except envs.EnvError:
            return None  # said by the flag's own row

    return asked


def _on_cpu(asked: Callable[[Request], str | None]) -> Callable[[Request], str | None]:
    return lambda request: asked(request) if request.device == "cpu" else None


_NOT_YET = "it is not supported with csa2 yet"
_FALSE = ("0", "false", "no", "n")
_DROP = "Leave the option out"

REFUSALS = (
    Refusal(
        "another model architecture",
        _architecture,
        "its layers are not CSA2",
        "Serve a DeepSeek-V4.1 model, or choose another --attention-backend",
    ),
    Refusal(
        "`--device` other than `cpu` or `cuda`",
        _device,
        "csa2's kernels are for CPUs and NVIDIA GPUs",
        "Use one of these, or another --attention-backend",
    ),
    Refusal(
        "csa2 for only one of prefill and decode",
        _mixed_backends,
        "prefill and decode share one cache in csa2's records, which no other backend reads",
        "Give --attention-backend csa2 alone",
    ),
    Refusal(
        "`--page-size` other than 256",
        _flag("page_size", PAGE_TOKENS),
        "the compressed caches are paged by 256 tokens",
        "Leave the option out or give 256",
    ),
    Refusal(
        "`--dsv4-attn-backend` other than `auto` or `flashmla`",
        _flag("dsv4_attn_backend", "auto", "flashmla"),
        "it selects kernels of the host's own dsv4 backend and changes how the model calls attention",
        _DROP,
    ),
    Refusal(
        "`--dsv4-prefill-backend flashmla_sparse_q8`",
        _flag("dsv4_prefill_backend", "auto", "flashmla_sparse"),
        "it selects prefill kernels of the host's own dsv4 backend",
        _DROP,
    ),
    Refusal(
        "`--dtype` other than `auto` or `bfloat16`",
        _flag("dtype", "auto", "bfloat16"),
        "queries, latents and the records' values are bf16, as in the released model",
        "Leave the option out or give bfloat16",
    ),
    Refusal(
        "`--kv-cache-dtype` other than `auto` or `fp8_e4m3`",
        _flag("kv_cache_dtype", "auto", "fp8_e4m3"),
        "csa2 stores the model's own FP8 and FP4 grids and nothing else",
        "Leave the option out or give fp8_e4m3",
    ),
    Refusal(
        "`--dcp-size` above 1", _above_one("dcp_size"), "context-parallel decode splits the pool; " + _NOT_YET, _DROP
    ),
    Refusal(
        "prefill or attention context parallelism",
        _either(
            _any_flag("enable_prefill_cp", "enable_cp_decode_attn_tp", "enable_kv_cache_sharding"),
            _above_one("attn_cp_size"),
        ),
        "rows of one request would lie on several ranks; " + _NOT_YET,
        _DROP,
    ),
    Refusal(
        "DP attention",
        _either(_flag("enable_dp_attention"), _above_one("attn_dp_size")),
        "idle and padded ranks have not been tested; " + _NOT_YET,
        _DROP,
    ),
    Refusal(
        "`--enable-encoder-swa-bounded-replay`",
        _flag("enable_encoder_swa_bounded_replay"),
        "it keeps window KV per request instead of per page; " + _NOT_YET,
        _DROP + "; decoder SWA bounded replay is served",
    ),
    Refusal(
        "`--speculative-algorithm`",
        _any_flag("speculative_algorithm", "speculative_draft_model_path"),
        "verify rows and draft pools are not wired; " + _NOT_YET,
        _DROP,
    ),
    Refusal(
        "PD disaggregation",
        _either(_flag("disaggregation_mode", "null"), _flag("enable_pd_role_switch")),
        "the transfer of csa2's records has not been tested; " + _NOT_YET,
        _DROP,
    ),
    Refusal(
        "`--disaggregation-decode-retraction-backup`",
        _flag("disaggregation_decode_retraction_backup"),
        "it copies KV to the host; " + _NOT_YET,
        _DROP + "; ordinary retraction is served",
    ),
    Refusal(
        "hierarchical cache and external cache connectors",
        _any_flag(
            "enable_hierarchical_cache",
            "hicache_storage_backend",
            "enable_lmcache",
            "enable_flexkv",
            "enable_unified_cache_external_linker",
            "radix_cache_backend",
        ),
        "they move cache pages by the host's layouts; " + _NOT_YET,
        _DROP,
    ),
    Refusal(
        "unified or page-major KV memory",
        _any_flag("enable_unified_memory", "enable_page_major_kv_layout", "prefill_only_disable_kv_cache"),
        "csa2's buffers are one per source layer",
        _DROP,
    ),
    Refusal(
        "`--disable-hybrid-swa-memory`",
        _flag("disable_hybrid_swa_memory"),
        "the host then builds another pool, without window slots",
        _DROP,
    ),
    Refusal(
        "streaming and radix sessions",
        _any_flag("enable_streaming_session", "enable_session_radix_cache"),
        "a session may continue in the middle of a pair; " + _NOT_YET,
        _DROP,
    ),
    Refusal("PD multiplexing", _flag("enable_pdmux"), "it runs two backends over one pool; " + _NOT_YET, _DROP),
    Refusal("`--kv-canary`", _flag("kv_canary", "none"), "it knows the host's own pool classes only", _DROP),
    Refusal(
        "`--enable-return-indexer-topk`",
        _flag("enable_return_indexer_topk"),
        "csa2's choices are not handed to the host's recorder; " + _NOT_YET,
        _DROP,
    ),
    Refusal(
        "prefill CUDA graphs",
        _prefill_graphs,
        "prefill runs eagerly in csa2",
        "Leave the option out or give disabled",
    ),
    Refusal(
        "`--enable-torch-compile` on the CPU",
        _on_cpu(_flag("enable_torch_compile")),
        "the backend's Python runs between compiled parts and has not been tested there",
        _DROP,
    ),
    Refusal(
        "`--enable-memory-saver` on the CPU",
        _on_cpu(_flag("enable_memory_saver")),
        "the saver preloads a CUDA allocator, and the scheduler process dies without one",
        _DROP,
    ),
    Refusal(
        "quantized weights on the CPU",
        _fp8_on_cpu,
        "the host's quantized layers are for GPUs, and csa2 is tested with bf16 weights only there",
        "Serve a bf16 checkpoint on the CPU",
    ),
    Refusal(
        "tensor parallelism on the CPU",
        _on_cpu(_above_one("tp_size")),
        "several ranks have not been tested there",
        "Use --tp-size 1",
    ),
    Refusal(
        "expert parallelism, placement and offloading on the CPU",
        _on_cpu(
            _either(
                _above_one("ep_size"),
                _flag("moe_a2a_backend", "none"),
                _flag("moe_runner_backend", "auto"),
                _any_flag(
                    "ep_num_redundant_experts",
                    "enable_eplb",
                    "enable_paged_experts",
                    "enable_elastic_expert_backup",
                    "kt_weight_path",
                ),
            )
        ),
        "csa2's CPU form of the experts takes all of them from one tensor",
        _DROP,
    ),
    Refusal("`--is-embedding`", _flag("is_embedding"), "pooling over hidden states has not been tested", _DROP),
    Refusal("LoRA", _any_flag("enable_lora", "lora_paths"), _NOT_YET, _DROP),
    Refusal(
        "`--enable-mis`",
        _flag("enable_mis"),
        "multi-item scoring changes the attention mask, which csa2 does not read",
        _DROP,
    ),
    Refusal(
        "`--dllm-algorithm`", _flag("dllm_algorithm"), "block diffusion attends to later tokens; CSA2 is causal", _DROP
    ),
    Refusal(
        "`--model-impl` other than `auto` or `sglang`",
        _flag("model_impl", "auto", "sglang"),
        "csa2 serves the host's own model class",
        _DROP,
    ),
    Refusal(
        "whole-model megakernels",
        _any_flag("enable_nvidia_megakernel", "enable_amd_monokernel", "enable_attn_tp_input_scattered"),
        "they replace or scatter the layers that call the backend",
        _DROP,
    ),
    Refusal(
        "a layout in `SGLANG_DSV4_KV_LAYOUT`",
        _env("SGLANG_DSV4_KV_LAYOUT", "", "v41_new"),
        "csa2 has layouts of its own",
        "Unset the variable; SGLANG_CSA2_KV_LAYOUT chooses between csa2's",
    ),
    Refusal(
        "a layout in `SGLANG_DSV4_COMPRESSED_KV_LAYOUT`",
        _env("SGLANG_DSV4_COMPRESSED_KV_LAYOUT", "", "auto", "fp4"),
        "csa2 stores main KV in the model's FP4 grid",
        "Unset the variable",
    ),
    Refusal(
        "`SGLANG_DSV4_USE_BF16_KV_QUANT_SOURCE`",
        _env("SGLANG_DSV4_USE_BF16_KV_QUANT_SOURCE", *_FALSE),
        "it stores window KV through another call of the host's own backend",
        "Unset the variable",
    ),
    Refusal(
        "`SGLANG_DSV4_UNIFIED_KV_FP8`",
        _env("SGLANG_DSV4_UNIFIED_KV_FP8", *_FALSE),
        "it selects another pool",
        "Unset the variable",
    ),
    Refusal(
        f"`{envs.KV_LAYOUT}` other than `v41` or `v4`",
        _value(envs.kv_layout),
        "csa2 keeps KV in one of these two layouts",
        "Unset the variable or give one of them",
    ),
    Refusal(
        f"`{envs.KV_LAYOUT}=v4` on a GPU without FlashMLA's V4 kernels",
        _route(routes.layout_problem),
        "on GPUs no other kernel reads 584-byte records",
        "Unset the variable, or install sgl-flash-mla on a card of compute capability 9.0, 10.0 or 10.3",
    ),
    Refusal(
        f"`{envs.DECODE_ATTENTION}` other than `auto`, `cuda`, `triton` or `flashmla`",
        _value(envs.decode_attention),
        "no route of attention has another name",
        "Unset the variable or give one of them",
    ),
    Refusal(
        f"a route in `{envs.DECODE_ATTENTION}` that the machine or the KV layout does not have",
        _route(routes.decode_problem),
        "nothing else is chosen in the place of what was asked for",
        "Unset the variable, or see python -m sglang_csa2 doctor",
    ),
    Refusal(
        f"`{envs.DEEP_GEMM_INDEXER}` without DeepGEMM's sparse index scores",
        _route(routes.indexer_problem),
        "nothing else is chosen in the place of what was asked for",
        "Unset the variable: csa2's own kernels score",
    ),
    Refusal(
        f"`{envs.DEEP_GEMM_INDEXER}` or `{envs.PREFILL_KV_REUSE}` that is neither a yes nor a no",
        _either(_value(envs.deep_gemm_indexer), _value(envs.prefill_kv_reuse)),
        "they are switches",
        "Give 1 or 0, or unset the variable",
    ),
)
