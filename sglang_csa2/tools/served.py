"""[host] An engine on the CPU that writes down what its index layers chose."""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any

from sglang_csa2 import envs
from sglang_csa2.layer_plan import LayerPlan
from sglang_csa2.tools.recorded import Recording, read


class TracedEngine:
    """A model served in this process and its children, with pools for a laptop; use it in a `with`."""

    def __init__(self, model: Path, plan: LayerPlan, **settings: Any):
        self._plan = plan
        self._folder = tempfile.TemporaryDirectory()
        defaults = {
            "model_path": str(model),
            "attention_backend": "csa2",
            "device": "cpu",
            "max_running_requests": 2,
            "max_total_tokens": 32768,
            "log_level": "error",
        }
        # The children read both; the host and its libraries warn about themselves at import.
        with _environment({envs.TRACE: self._folder.name, "PYTHONWARNINGS": "ignore"}), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import sglang

            self._engine = sglang.Engine(**defaults | settings)

    def __enter__(self) -> TracedEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.shutdown()
        self._folder.cleanup()

    def run(self, prompt: str | list[int], new_tokens: int = 1, **extra: Any) -> tuple[dict[str, Any], Recording]:
        """The greedy answer to a prompt (text or token ids), and what was chosen on the way."""
        for stale in Path(self._folder.name).glob("forward-*.pt"):
            stale.unlink()
        given = {"prompt": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
        sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        answer = self._engine.generate(**given, sampling_params=sampling, **extra)
        return answer, read(Path(self._folder.name), self._plan)


class _environment:
    """Environment variables for the time of a `with`."""

    def __init__(self, values: dict[str, str]):
        self._values, self._before = values, {name: os.environ.get(name) for name in values}

    def __enter__(self) -> None:
        os.environ.update(self._values)

    def __exit__(self, *_: object) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
