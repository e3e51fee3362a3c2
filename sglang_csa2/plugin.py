"""[host] The entry point: check the host, then register, all or nothing.

The host runs `register` in every process, before arguments are parsed, and logs exceptions instead of raising
them. So nothing here may fail late: a host that is not supported gets the name `csa2` and an override provider that
raises the refusal, and nothing else. What happens where:

- every process: the name `csa2` becomes a choice, and a model-override provider refuses what is not served and
  keeps the user's `csa2`, which the host would otherwise rewrite to `dsv4`;
- the scheduler process: one hook before `Scheduler.__init__`. In a csa2 run it installs the patch ledger and
  registers the backend; in any other run it does nothing.
"""

from __future__ import annotations

import sys
from typing import Any

from sglang_csa2 import host, refusals

_SCHEDULER_MODULE = "sglang.srt.managers.scheduler"
_registered = False


def register() -> None:
    """Register csa2 with the SGLang of this process. Idempotent."""
    global _registered
    if _registered:
        return
    _registered = True
    from sglang.srt.arg_groups.choices import add_attention_backend_choices

    # Importing `overrides` registers the stock providers, so that ours comes after them and wins.
    from sglang.srt.arg_groups.overrides import register_model_override_predicate

    add_attention_backend_choices([host.BACKEND_NAME])
    try:
        host.check_version()
    except host.HostMismatch as mismatch:
        register_model_override_predicate(_every_architecture)(_refusing_provider(mismatch))
        return
    register_model_override_predicate(_every_architecture)(csa2_overrides)
    # The module is loaded where a scheduler is about to run; elsewhere the hook would only cost its import.
    if _SCHEDULER_MODULE in sys.modules:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(f"{_SCHEDULER_MODULE}.Scheduler.__init__", before_scheduler, HookType.BEFORE)


def csa2_overrides(server_args: Any, hf_config: Any) -> dict[str, Any]:
    """The override provider: nothing unless the user asked for csa2; then the refusals, then csa2.

    Raises:
        host.HostMismatch: a host symbol differs from the table.
        refusals.Refused: a setting is not served.
        ConfigError: the model's config breaks a rule of CSA2.
    """
    if not asks_for_csa2(server_args):
        return {}
    from sglang.srt.arg_groups.model_override_base import resolving_view

    from sglang_csa2.config import Csa2Config

    host.check_symbols()
    # The device may be left to the host, which has chosen one by now; the other settings are read as given.
    device = resolving_view(server_args).device
    refusals.check(server_args, hf_config, device)
    Csa2Config.from_hf(hf_config)
    overrides = {"attention_backend": host.BACKEND_NAME, "dsv4_attn_backend": "flashmla"}
    if device == "cpu" and server_args.enable_decoder_swa_bounded_replay is None:
        # An approximation by design, the host's default on GPUs: on the CPU exact unless asked.
        overrides["enable_decoder_swa_bounded_replay"] = False
    return overrides


def asks_for_csa2(server_args: Any) -> bool:
    """Whether any of the attention-backend arguments names csa2."""
    names = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    return host.BACKEND_NAME in (getattr(server_args, name, None) for name in names)


def before_scheduler(scheduler: Any, server_args: Any, port_args: Any) -> None:
    """In a csa2 run, install the ledger and the backend before the scheduler builds its model."""
    from sglang.srt.runtime_context import attention_backends, get_device

    del scheduler, server_args, port_args
    if host.BACKEND_NAME in attention_backends():
        install(get_device().device)


def install(device: str) -> None:
    """Apply the patch ledger and register the backend in this process. Idempotent."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from sglang_csa2 import patches

    patches.install(device)
    register_attention_backend(host.BACKEND_NAME)(_create_backend)


def _create_backend(model_runner: Any) -> Any:
    from sglang_csa2.backend import Csa2AttnBackend

    return Csa2AttnBackend(model_runner)


def _every_architecture(architecture: str) -> bool:
    del architecture
    return True


def _refusing_provider(mismatch: host.HostMismatch):
    def csa2_refusal(server_args: Any, hf_config: Any) -> dict[str, Any]:
        del hf_config
        if asks_for_csa2(server_args):
            raise mismatch
        return {}

    return csa2_refusal
