"""Registration: all or nothing, idempotent, and nothing at all for another backend."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import installed_host
from served import TINY, environment, launch_arguments, server_options

from sglang_csa2 import host, plugin

# A stock model that the host serves on any CPU: it needs no rotary kernel.
STOCK_CONFIG = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4,
    "n_positions": 512, "n_ctx": 512, "vocab_size": 512, "torch_dtype": "float32", "bos_token_id": 0,
    "eos_token_id": 1, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
}  # fmt: skip

# The engine spawns processes that import this text as a script, hence the guard.
STOCK_RUN = """
import json, sys
if __name__ == "__main__":
    from sglang.srt.entrypoints.engine import Engine
    engine = Engine(model_path=sys.argv[1], device="cpu", load_format="dummy", skip_tokenizer_init=True,
                    attention_backend="torch_native", random_seed=7, max_total_tokens=2048, max_running_requests=2,
                    log_level="error")
    answers = [engine.generate(input_ids=ids, sampling_params=dict(max_new_tokens=12, temperature=0),
                               return_logprob=True, logprob_start_len=0) for ids in ([3, 5, 8], list(range(2, 90)))]
    keep = [(a["output_ids"], a["meta_info"]["input_token_logprobs"], a["meta_info"]["output_token_logprobs"])
            for a in answers]
    print("ANSWER" + json.dumps(keep))
    engine.shutdown()
"""


def run(command: list[str], **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, env=environment(**env), timeout=300)


def test_the_table_matches_the_installed_host():
    host.check_version()
    host.check_symbols()


@pytest.mark.parametrize(
    ("path", "parameters", "difference"),
    [
        ("sglang.srt.managers.scheduler:Scheduler.no_such_method", None, "does not exist"),
        ("sglang.srt.no_such_module:thing", None, "does not exist"),
        ("sglang.srt.models.deepseek_v4:MqaAttentionBase._kernel_num_heads", "self", "expected (self)"),
    ],
)
def test_a_changed_symbol_is_named(path, parameters, difference):
    with pytest.raises(host.HostMismatch) as error:
        host.check_symbols((host.HostSymbol(path, "a test", parameters),))
    text = str(error.value)
    assert path in text and difference in text and "Supported: sglang 0.5.23" in text and "pip install" in text


def test_registering_twice_changes_nothing():
    installed_host()
    from sglang.srt.arg_groups import model_override_base
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES

    before = len(model_override_base._PREDICATE_OVERRIDE_FNS)
    plugin.register()
    assert ATTENTION_BACKEND_CHOICES.count("csa2") == 1
    assert len(model_override_base._PREDICATE_OVERRIDE_FNS) == before


def test_the_override_leaves_other_backends_alone():
    arguments = SimpleNamespace(attention_backend="dsv4", prefill_attention_backend=None, decode_attention_backend=None)
    assert plugin.csa2_overrides(arguments, hf_config=None) == {}


def test_the_ledger_is_installed_for_csa2_only(monkeypatch):
    installed_host()
    from sglang.srt import runtime_context

    calls = []
    monkeypatch.setattr(plugin, "install", calls.append)
    monkeypatch.setattr(runtime_context, "attention_backends", lambda: ("triton", "triton"))
    plugin.before_scheduler(None, None, None)
    assert calls == []
    monkeypatch.setattr(runtime_context, "attention_backends", lambda: ("csa2", "csa2"))
    plugin.before_scheduler(None, None, None)
    assert calls == ["cpu"]


def test_the_backend_verifies_what_it_stands_on(monkeypatch):
    installed_host()
    from sglang_csa2 import backend, patches

    stock = type("DeepSeekV4TokenToKVPool", (), {})()
    with pytest.raises(backend.BackendError, match="not Csa2KVPool"):
        backend._verify(stock, "cpu")
    pool = object.__new__(backend.Csa2KVPool)
    backend._verify(pool, "cpu")
    monkeypatch.setattr(patches.LEDGER[0].__class__, "is_applied", lambda self: "select" not in self.target)
    with pytest.raises(backend.BackendError, match="select_dsv4_kv_layout"):
        backend._verify(pool, "cpu")
    monkeypatch.undo()
    monkeypatch.setattr(backend, "attention_backends", lambda: ("dsv4", "dsv4"))
    with pytest.raises(backend.BackendError, match="resolved the backends"):
        backend._verify(pool, "cpu")


def test_a_draft_pool_stays_stock():
    installed_host()
    from sglang.srt.mem_cache import kv_cache_configurator
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool

    from sglang_csa2.patches import memory
    from sglang_csa2.pool import Csa2KVPool, host_layout

    def original(self, **kwargs):
        layout, _ = memory.select_layout(lambda: ("stock layout", None))
        return kv_cache_configurator.DeepSeekV4TokenToKVPool, layout

    draft, target = SimpleNamespace(is_draft_worker=True), SimpleNamespace(is_draft_worker=False)
    assert memory.build_pool(original, draft) == (DeepSeekV4TokenToKVPool, "stock layout")
    assert memory.build_pool(original, target) == (Csa2KVPool, host_layout().swa)
    assert kv_cache_configurator.DeepSeekV4TokenToKVPool is DeepSeekV4TokenToKVPool


@pytest.mark.server
def test_an_unsupported_host_refuses_on_the_command_line_and_in_the_engine(tiny_model):
    unsupported = "import sglang_csa2.host as h; h.SUPPORTED_VERSIONS = ('9.9.9',)\n"
    cli = server_options(31999, "--skip-tokenizer-init")
    code = unsupported + f"import runpy, sys; sys.argv = ['launch_server', *{cli!r}]\n"
    code += "runpy.run_module('sglang.launch_server', run_name='__main__')"
    answer = run([sys.executable, "-c", code])
    assert answer.returncode != 0
    assert "sglang 0.5.23 is installed, which csa2 has not been checked against" in answer.stderr
    code = unsupported + "from sglang.srt.entrypoints.engine import Engine\n"
    code += f"Engine(model_path={str(TINY)!r}, device='cpu', attention_backend='csa2', skip_tokenizer_init=True)"
    answer = run([sys.executable, "-c", code])
    assert answer.returncode != 0 and "Supported: sglang 9.9.9" in answer.stderr


@pytest.mark.server
def test_without_the_plugin_the_name_is_unknown(tiny_model):
    answer = run(launch_arguments(31998), SGLANG_PLUGINS="none")
    assert answer.returncode == 2 and "invalid choice: 'csa2'" in answer.stderr


@pytest.mark.server
def test_a_stock_model_is_the_same_to_the_byte_with_and_without_the_plugin(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(STOCK_CONFIG))
    script = tmp_path / "stock.py"
    script.write_text(STOCK_RUN)
    answers = []
    for plugins in ("csa2", "none"):
        result = run([sys.executable, str(script), str(tmp_path)], SGLANG_PLUGINS=plugins)
        assert result.returncode == 0, result.stderr[-3000:]
        answers.append(result.stdout.split("ANSWER")[1])
    assert answers[0] == answers[1]


def test_registration_is_light():
    """In a process that runs no scheduler, the plugin imports none of the host's model or pool modules."""
    code = (
        "import sys; from sglang_csa2 import plugin; plugin.register(); "
        "heavy = ['sglang.srt.models.deepseek_v4', 'sglang.srt.mem_cache.deepseek_v4_memory_pool', "
        "'sglang.srt.managers.scheduler', 'sglang.srt.layers.attention.deepseek_v4_backend']; "
        "print([m for m in heavy if m in sys.modules])"
    )
    answer = run([sys.executable, "-c", code])
    assert answer.stdout.strip().endswith("[]"), answer.stderr[-2000:]
    assert Path(TINY).exists()
