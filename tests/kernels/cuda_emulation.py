"""Builds a CUDA C++ kernel for the CPU: its source, with threads as fibers and PTX emulated (`cuda_emulation.h`)."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from sglang_csa2.kernels import cuda_build

CXX = shutil.which("g++")
needs_compiler = pytest.mark.skipif(CXX is None, reason="needs g++")


def build(source, launch, functions, folder, flags=()):
    """The library of a kernel whose launch section is replaced by `launch`; `flags`: further ones of the compiler."""
    (folder / "kernel.cpp").write_text(_host_source(source.read_text(), launch))
    here = Path(__file__).parent
    command = [CXX, "-O2", "-std=c++20", "-shared", "-fPIC", "-w", f"-I{here}", *flags, "-o", "kernel.so", "kernel.cpp"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[:3000]
    return cuda_build.declare(ctypes.CDLL(str(folder / "kernel.so")), functions)


def check(status):
    assert status == 0, "the kernel's threads wait for each other" if status == 999 else f"error {status}"


def _sections(source):
    """The source cut at its section headings: [(heading, text)]."""
    parts = source.split("\n// ---- ")
    return [("", parts[0])] + [(part.split(" -")[0], part[part.index("\n") :]) for part in parts[1:]]


def _expand(text, seen):
    """The text with the headers that it includes in place, each once; ptx.cuh and launch.cuh are emulated."""

    def header(match):
        name = match.group(1)
        if name in seen:
            return ""
        seen.add(name)
        return _expand((cuda_build.SOURCES / name).read_text().replace("#pragma once", ""), seen)

    return re.sub(r'#include "(\w+\.cuh)"\n', header, text)


def _host_source(source, launch):
    text = ['#include "cuda_emulation.h"\n']
    for heading, body in _sections(source):
        if heading == "":
            text.append(_expand(body, {"ptx.cuh", "launch.cuh"}))
        elif heading == "Launch":
            text.append(launch)
        else:
            text.append(body)
    memory = "extern __shared__ __align__(1024) uint8_t memory[];"
    source = "\n".join(text)
    assert memory in source
    return source.replace(memory, "uint8_t* memory = emulation::current->block->shared;")
