"""Build a CUDA C++ kernel of `csrc/` with nvcc and load it through its C interface.

    build(source)       -> path of its shared library, compiled where the user's cache has none of this source and flags
    build_all()         -> all of `csrc/`
    missing(capability) -> why the CUDA C++ kernels cannot serve here, or None

The kernels are written for Hopper (sm_90a). No host stack and no torch extension is needed, only nvcc.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "csrc"
NVCC_FLAGS = ("-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a")
# Further ones, for instance -DCSA2_EVERY_LANE_ARRIVES under compute-sanitizer (ptx.cuh).
EXTRA_FLAGS = "CSA2_NVCC_FLAGS"
CAPABILITY = 90
# Kernels start while the one before them in the stream ends (programmatic dependent launch): 1 to 2 us less a launch.
EARLY_START = True


def build(source: Path, folder: Path | None = None) -> Path:
    """The compiled library of a source, one per content of it, its headers and flags.

    Raises:
        RuntimeError: nvcc is missing or fails.
    """
    files = [source, *sorted(SOURCES.glob("*.cuh"))]
    flags = [*NVCC_FLAGS, *os.environ.get(EXTRA_FLAGS, "").split()]
    content = b"\0".join(path.read_bytes() for path in files) + " ".join(flags).encode()
    folder = folder or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-csa2"
    library = folder / f"{source.stem}-{hashlib.sha256(content).hexdigest()[:16]}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        target = Path(scratch) / library.name
        command = [find_nvcc(), *flags, "-shared", "-Xcompiler", "-fPIC", "-o", str(target), str(source)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr[-2000:]}")
        # In one step: processes that build at once agree on a whole file.
        target.replace(library)
    return library


def build_all() -> None:
    """Every library at once, each by its own nvcc: a first start waits for the longest and not for their sum."""
    with ThreadPoolExecutor() as executor:
        list(executor.map(build, sorted(SOURCES.glob("*.cu"))))


def load(source: Path, functions: dict[str, list[type]]) -> ctypes.CDLL:
    """The library of a source, built where missing; `functions`: argument types of each, which returns an int."""
    return declare(ctypes.CDLL(str(build(source))), functions)


def declare(library: ctypes.CDLL, functions: dict[str, list[type]]) -> ctypes.CDLL:
    """The same on a library that is open."""
    for name, arguments in functions.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    return library


def missing(capability: int) -> str | None:
    """Why the CUDA C++ kernels cannot serve a card of this compute capability (90 for 9.0) here, or None."""
    if capability != CAPABILITY:
        return f"the CUDA C++ kernels are built for compute capability 9.0, this card has {capability / 10:.1f}"
    try:
        find_nvcc()
    except RuntimeError as problem:
        return str(problem)
    return None


def find_nvcc() -> str:
    """Path of nvcc: CUDA_HOME, CUDA_PATH, /usr/local/cuda, then PATH.

    Raises:
        RuntimeError: there is none.
    """
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    found = [shutil.which("nvcc", path=os.path.join(home, "bin")) for home in homes if home]
    nvcc = next((path for path in [*found, shutil.which("nvcc")] if path), None)
    if nvcc is None:
        raise RuntimeError(
            "the CUDA C++ kernels need nvcc (CUDA 12.3 or later), and none is in CUDA_HOME, /usr/local/cuda or PATH: "
            "install the CUDA toolkit, or let the Triton kernels serve"
        )
    return nvcc


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a Hopper card.

    Raises:
        RuntimeError: the card is another.
    """
    properties = torch.cuda.get_device_properties(device)
    if 10 * properties.major + properties.minor != CAPABILITY:
        raise RuntimeError(
            f"the CUDA C++ kernels are built for Hopper (compute capability 9.0), and {properties.name} has "
            f"{properties.major}.{properties.minor}: use the Triton kernels"
        )
    return properties.multi_processor_count


def stream() -> int:
    """The current device's current stream, as the C interfaces take it."""
    return torch.cuda.current_stream().cuda_stream


def check_devices(*tensors: torch.Tensor | None) -> None:
    """Raise unless every tensor is on one CUDA device."""
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if len(devices) > 1 or any(device.type != "cuda" for device in devices):
        raise ValueError(f"every tensor must be on one CUDA device, got {sorted(map(str, devices))}: move them")
