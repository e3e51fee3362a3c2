"""Every row of the table of refusals, through the host's own argument resolution."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from harness import TINY, installed_host
from served import environment, launch_arguments

from sglang_csa2 import envs, refusals, routes

# A setting for every row of the table, as a user gives it. `ARGS` go through the host's parser and resolution;
# where the host's own checks come before ours, or the setting is not an option, the table is asked directly.
ARGS = {
    "csa2 for only one of prefill and decode": ["--prefill-attention-backend", "triton"],
    "`--page-size` other than 256": ["--page-size", "128"],
    "`--dsv4-attn-backend` other than `auto` or `flashmla`": ["--dsv4-attn-backend", "trtllm"],
    "`--dsv4-prefill-backend flashmla_sparse_q8`": ["--dsv4-prefill-backend", "flashmla_sparse_q8"],
    "`--dtype` other than `auto` or `bfloat16`": ["--dtype", "float16"],
    "`--kv-cache-dtype` other than `auto` or `fp8_e4m3`": ["--kv-cache-dtype", "bfloat16"],
    "`--dcp-size` above 1": ["--dcp-size", "2", "--tp-size", "2"],
    "prefill or attention context parallelism": ["--enable-prefill-cp", "--tp-size", "2"],
    "DP attention": ["--enable-dp-attention", "--attn-dp-size", "2", "--tp-size", "2"],
    "`--enable-encoder-swa-bounded-replay`": ["--enable-encoder-swa-bounded-replay"],
    "`--speculative-algorithm`": ["--speculative-algorithm", "DSPARK"],
    "PD disaggregation": ["--disaggregation-mode", "prefill"],
    "`--disaggregation-decode-retraction-backup`": ["--disaggregation-decode-retraction-backup", "cpu_tensor"],
    "hierarchical cache and external cache connectors": ["--enable-hierarchical-cache"],
    "unified or page-major KV memory": ["--enable-unified-memory"],
    "`--disable-hybrid-swa-memory`": ["--disable-hybrid-swa-memory"],
    "streaming and radix sessions": ["--enable-streaming-session"],
    "PD multiplexing": ["--enable-pdmux"],
    "`--kv-canary`": ["--kv-canary", "log"],
    "`--enable-return-indexer-topk`": ["--enable-return-indexer-topk"],
    "prefill CUDA graphs": ["--cuda-graph-backend-prefill", "breakable"],
    "`--enable-torch-compile` on the CPU": ["--enable-torch-compile"],
    "`--enable-memory-saver` on the CPU": ["--enable-memory-saver"],
    "quantized weights on the CPU": ["--quantization", "fp8"],
    "tensor parallelism on the CPU": ["--tp-size", "2"],
    "expert parallelism, placement and offloading on the CPU": ["--moe-a2a-backend", "deepep"],
    "`--is-embedding`": ["--is-embedding"],
    "LoRA": ["--enable-lora"],
    "`--enable-mis`": ["--enable-mis"],
    "`--dllm-algorithm`": ["--dllm-algorithm", "LowConfidence"],
    "`--model-impl` other than `auto` or `sglang`": ["--model-impl", "transformers"],
    "whole-model megakernels": ["--enable-nvidia-megakernel"],
}
ENVIRONMENT = {
    "a layout in `SGLANG_DSV4_KV_LAYOUT`": {"SGLANG_DSV4_KV_LAYOUT": "v4"},
    "a layout in `SGLANG_DSV4_COMPRESSED_KV_LAYOUT`": {"SGLANG_DSV4_COMPRESSED_KV_LAYOUT": "fp8"},
    "`SGLANG_DSV4_USE_BF16_KV_QUANT_SOURCE`": {"SGLANG_DSV4_USE_BF16_KV_QUANT_SOURCE": "1"},
    "`SGLANG_DSV4_UNIFIED_KV_FP8`": {"SGLANG_DSV4_UNIFIED_KV_FP8": "true"},
}
# Routes that a machine or a layout does not have: the machine, the environment and what the message names.
H200, A100 = routes.Machine("cuda", 90, "H200"), routes.Machine("cuda", 80, "A100")
CPU = routes.Machine("cpu", 0, "CPU")
_LAYOUT, _DECODE, _INDEXER = envs.KV_LAYOUT, envs.DECODE_ATTENTION, envs.DEEP_GEMM_INDEXER
ROUTES = [
    (f"`{_LAYOUT}` other than `v41` or `v4`", CPU, {_LAYOUT: "v5"}, "SGLANG_CSA2_KV_LAYOUT='v5'"),
    (f"`{_LAYOUT}=v4` on a GPU without FlashMLA's V4 kernels", A100, {_LAYOUT: "v4"}, "this card has 8.0"),
    (f"`{_LAYOUT}=v4` on a GPU without FlashMLA's V4 kernels", H200, {_LAYOUT: "v4"}, "sgl-flash-mla is not installed"),
    (
        f"`{_DECODE}` other than `auto`, `cuda`, `triton` or `flashmla`",
        H200,
        {_DECODE: "fast"},
        "SGLANG_CSA2_DECODE_ATTENTION='fast'",
    ),
    *(
        (f"a route in `{_DECODE}` that the machine or the KV layout does not have", machine, env, what)
        for machine, env, what in (
            (CPU, {_DECODE: "triton"}, "Triton kernels are for GPUs"),
            (A100, {_DECODE: "cuda"}, "compute capability 9.0, this card has 8.0"),
            (H200, {_DECODE: "flashmla"}, "v41 records on compute capability 10.0, 10.3 only"),
            (H200, {_DECODE: "triton", _LAYOUT: "v4"}, "it reads v41 records, not v4"),
            (H200, {_DECODE: "cuda", _LAYOUT: "v4"}, "it reads v41 records, not v4"),
        )
    ),
    (f"`{_INDEXER}` without DeepGEMM's sparse index scores", H200, {_INDEXER: "1"}, "this card has 9.0"),
    (f"`{_INDEXER}` without DeepGEMM's sparse index scores", CPU, {_INDEXER: "on"}, "it is for GPUs"),
    (
        f"`{_INDEXER}` or `{envs.PREFILL_KV_REUSE}` that is neither a yes nor a no",
        H200,
        {_INDEXER: "maybe"},
        "SGLANG_DSV41_DEEP_GEMM_CANDIDATE_INDEXER='maybe'",
    ),
]
OTHERWISE = {"another model architecture", "`--device` other than `cpu` or `cuda`"}
V41 = SimpleNamespace(architectures=["DeepseekV4ForCausalLM"], model_type="deepseek_v41", quantization_config=None)
PLAIN = SimpleNamespace(attention_backend="csa2")


def parse(*arguments: str):
    from sglang.srt.server_args import prepare_server_args

    installed_host()
    base = ["--model-path", str(TINY), "--device", "cpu", "--attention-backend", "csa2", "--skip-tokenizer-init"]
    return prepare_server_args([*base, *arguments])


def message_of(setting: str) -> str:
    (row,) = [row for row in refusals.REFUSALS if row.setting == setting]
    return f"{row.reason}. {row.remedy}."


def test_every_row_has_a_test():
    assert {row.setting for row in refusals.REFUSALS} == ARGS.keys() | ENVIRONMENT.keys() | OTHERWISE | {
        row[0] for row in ROUTES
    }


def test_defaults_are_served():
    arguments = parse()
    arguments.resolve_once()
    refusals.check(arguments, V41, "cpu", env={})


@pytest.mark.parametrize(("options", "replays"), [([], False), (["--enable-decoder-swa-bounded-replay"], True)])
def test_the_exact_path_unless_asked(options, replays):
    from sglang.srt.arg_groups.overrides import resolved_view

    arguments = parse(*options)
    arguments.resolve_once()
    view = resolved_view(arguments)
    assert view.enable_decoder_swa_bounded_replay is replays
    assert (view.attention_backend, view.page_size, view.kv_cache_dtype) == ("csa2", 256, "fp8_e4m3")


@pytest.mark.parametrize("setting", ARGS)
def test_refused_arguments(setting):
    """The table speaks on the arguments as the host parses them."""
    with pytest.raises(refusals.Refused) as error:
        refusals.check(parse(*ARGS[setting]), V41, "cpu", env={})
    assert message_of(setting) in str(error.value)
    assert "csa2 does not serve" in str(error.value)


@pytest.mark.parametrize("setting", ENVIRONMENT)
def test_refused_environment(setting):
    with pytest.raises(refusals.Refused, match=re.escape(message_of(setting))):
        refusals.check(PLAIN, V41, "cpu", env=ENVIRONMENT[setting])


@pytest.fixture
def flash_mla(monkeypatch):
    """Say that sgl-flash-mla is installed, or that it is not, whatever this machine has."""

    def installed(yes: bool) -> None:
        module = ModuleType("flash_mla")
        module.__spec__ = ModuleSpec("flash_mla", None)
        monkeypatch.setitem(sys.modules, "flash_mla", module if yes else None)

    return installed


@pytest.mark.parametrize(("setting", "machine", "env", "what"), ROUTES, ids=lambda value: str(value)[:60])
def test_refused_routes(setting, machine, env, what, flash_mla):
    flash_mla("is not installed" not in what)
    with pytest.raises(refusals.Refused, match=re.escape(message_of(setting))) as error:
        refusals.check(PLAIN, V41, machine.device, env=env, machine=machine)
    assert what in str(error.value) and len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("env", [{}, {_LAYOUT: "V4"}, {_LAYOUT: "v4", _DECODE: "auto"}], ids=str)
def test_layouts_that_the_cpu_serves(env):
    refusals.check(PLAIN, V41, "cpu", env=env, machine=CPU)


@pytest.mark.parametrize(
    ("architecture", "model_type"), [("LlamaForCausalLM", "llama"), ("DeepseekV4ForCausalLM", "deepseek_v4")]
)
def test_other_models_are_refused(architecture, model_type):
    config = SimpleNamespace(architectures=[architecture], model_type=model_type)
    with pytest.raises(refusals.Refused, match="its layers are not CSA2"):
        refusals.check(PLAIN, config, "cpu", env={})


def test_other_devices_are_refused():
    with pytest.raises(refusals.Refused, match="--device xpu"):
        refusals.check(PLAIN, V41, "xpu", env={})


@pytest.mark.parametrize("as_dict", [True, False])
def test_prefill_graphs_in_the_graph_config(as_dict):
    from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig

    config = {"prefill": {"backend": "breakable"}}
    arguments = SimpleNamespace(
        attention_backend="csa2", cuda_graph_config=config if as_dict else CudaGraphConfig.from_dict(config)
    )
    with pytest.raises(refusals.Refused, match="--cuda-graph-config with prefill backend breakable"):
        refusals.check(arguments, V41, "cpu", env={})
    arguments.cuda_graph_config = CudaGraphConfig()
    refusals.check(arguments, V41, "cpu", env={})


def test_harmless_values_pass():
    harmless = ["--page-size", "256", "--dtype", "bfloat16", "--quantization", "unquant", "--kv-canary", "none"]
    environment = {"SGLANG_DSV4_USE_BF16_KV_QUANT_SOURCE": "no", "SGLANG_DSV4_KV_LAYOUT": "v41_new"}
    refusals.check(parse(*harmless, "--disaggregation-mode", "null"), V41, "cpu", environment)


def test_several_refusals_are_told_at_once():
    with pytest.raises(refusals.Refused) as error:
        refusals.check(parse("--page-size", "128", "--enable-lora"), V41, "cpu", {"SGLANG_DSV4_KV_LAYOUT": "v41"})
    assert len(str(error.value).splitlines()) == 3


@pytest.mark.parametrize(
    "setting", ["`--page-size` other than 256", "`--kv-cache-dtype` other than `auto` or `fp8_e4m3`"]
)
def test_resolution_stops_with_the_refusal(setting):
    """The provider runs inside the host's resolution, before weights load and before the host overwrites a value."""
    with pytest.raises(refusals.Refused, match=re.escape(message_of(setting))):
        parse(*ARGS[setting]).resolve_once()


@pytest.mark.parametrize(
    ("option", "what"),
    [
        ("--enable-hisparse", "does not support HiSparse"),
        ("--enable-two-batch-overlap", "does not support two-batch overlap"),
        ("--pp-size=2", "does not support pipeline parallelism"),
        ("--enable-deterministic-inference", "deterministic inference, but you explicitly specified 'csa2'"),
    ],
)
def test_what_the_host_refuses_stays_refused(option, what):
    with pytest.raises(ValueError, match=what):
        parse(option).resolve_once()


@pytest.mark.server
def test_the_command_line_and_the_engine_say_it(tiny_model):
    answer = subprocess.run(
        launch_arguments(31997, "--page-size", "64"), capture_output=True, text=True, env=environment(), timeout=300
    )
    assert answer.returncode != 0
    assert answer.stderr.strip().splitlines()[-1].endswith(message_of("`--page-size` other than 256"))
    code = "from sglang.srt.entrypoints.engine import Engine\n"
    code += f"Engine(model_path={str(TINY)!r}, device='cpu', attention_backend='csa2', enable_lora=True)"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), timeout=300
    )
    assert answer.returncode != 0 and message_of("LoRA") in answer.stderr


def test_the_readme_lists_every_row():
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert not re.search(r"\b(SEEN|SIZE|RESULT|REFUSAL)_[A-Z_]+\b", readme), "a placeholder was left"
    for row in refusals.REFUSALS:
        assert f"| {row.setting} | {row.reason} | {row.remedy} |" in readme
