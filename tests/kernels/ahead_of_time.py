"""Compile what a public function would launch, for a GPU that need not be there.

The function runs on CPU tensors with a stand-in driver, and every launch compiles without running. So signature,
alignment and options are those of a real launch.
"""

import os
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from sglang_csa2.kernels import triton_sparse_attention

# Bytes of shared memory that one program may use.
SHARED_LIMIT = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel's name, shared bytes, and what cuobjdump says: registers, stack bytes (spills)."""

    name: str
    shared: int
    registers: int | None
    stack: int | None
    asm: dict

    def __str__(self):
        return f"{self.name}: {self.registers} registers, {self.stack} B stack, {self.shared} B shared"


class _Driver:
    def __init__(self, capability):
        self._capability = capability

    def get_current_target(self):
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self):
        # Triton caches compiled kernels per device: one device per target keeps them apart.
        return self._capability

    def get_current_stream(self, device):
        return 0


@contextmanager
def compiling_for(capability):
    """Inside, launches compile for sm_<capability> and append to the list that is yielded."""
    compiled = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        kernel = kernel.result() if hasattr(kernel, "result") else kernel
        registers, stack = _resources(kernel.asm["cubin"])
        name = f"sm_{capability} {self.fn.__name__}"
        compiled.append(Compiled(name, kernel.metadata.shared, registers, stack, kernel.asm))
        return kernel

    # With the assembler that Triton ships: the host points Triton at the machine's own where there is one.
    shipped = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_PTXAS")}
    driver.set_active(_Driver(capability))
    try:
        with (
            mock.patch.dict(os.environ, shipped, clear=True),
            mock.patch.object(JITFunction, "run", compile_only),
            mock.patch.object(triton_sparse_attention, "compute_capability", lambda device: capability),
        ):
            yield compiled
    finally:
        driver._active = None


def _resources(cubin):
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return None, None
    path = Path(f"/tmp/csa2-{id(cubin)}.cubin")
    path.write_bytes(cubin)
    try:
        text = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True).stdout
    finally:
        path.unlink()
    if "REG:" not in text:
        return None, None
    fields = dict(part.split(":", 1) for part in text.split() if ":" in part and part[0].isupper())
    return int(fields["REG"]), int(fields["STACK"])
