"""Nothing that a request or a checkpoint says is run, unpickled or allocated unchecked."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
from source_scan import UNSAFE_LOAD, findings

from sglang_csa2.config import ConfigError, Csa2Config
from sglang_csa2.layer_plan import LayerPlan

REPOSITORY = Path(__file__).parents[2]
SOURCES = {
    str(path.relative_to(REPOSITORY).with_suffix("")): path
    for name in ("sglang_csa2", "kernels", "patches")
    for path in sorted((REPOSITORY / name).rglob("*.py"))
}
TINY = json.loads((REPOSITORY / "configs" / "tiny-dsv41" / "config.json").read_text())
# What none of a request's or a checkpoint's data reaches: each with why it is there.
ALLOWED = {
    # Runs nvcc on its own source in a scratch folder and loads the result.
    "kernels/cuda_build": {"subprocess", "ctypes", "shutil", "tempfile"},
    # Load what that built.
    "kernels/cuda_index_decode": {"ctypes", "sglang_csa2.kernels.cuda_build.load"},
    "kernels/cuda_index_scores": {"ctypes", "sglang_csa2.kernels.cuda_build.load"},
    "kernels/cuda_sparse_attention": {"ctypes", "sglang_csa2.kernels.cuda_build.load"},
    "kernels/cuda_topk": {"ctypes", "sglang_csa2.kernels.cuda_build.load"},
    # Imports a command's module by a name of its own table; opens /dev/null for what nobody reads.
    "sglang_csa2/__main__": {"importlib.import_module", "os.open"},
    # The JSON of a folder that the user of `verify` names.
    "sglang_csa2/reference_model": {"json.loads"},
    # Asks the server that the user of `verify` names, and reads its JSON.
    "sglang_csa2/tools/checks": {"urllib", "json.load"},
    # The config.json that the user of `plan` names.
    "sglang_csa2/tools/plan": {"json.loads"},
    # The traces of a folder that the user of `show` names, tensors only.
    "sglang_csa2/tools/recorded": {"torch.load"},
    # A scratch folder for an engine's traces, cleared of an earlier run's.
    "sglang_csa2/tools/served": {"tempfile", ".unlink"},
    # A trace gets its name once it is whole.
    "sglang_csa2/trace": {".rename"},
    # The recording, JSON, that the user of `verify` names.
    "sglang_csa2/tools/verify": {"json.loads"},
}


@pytest.mark.parametrize("name", SOURCES)
def test_no_pickle_eval_network_or_shell(name):
    refused, stale = judged(SOURCES[name].read_text(), ALLOWED.get(name, set()))
    assert not refused, f"{name}: {refused}"
    assert not stale, f"{name} no longer needs {stale}: take the allowance away"


def test_every_allowance_is_a_files():
    assert set(ALLOWED) <= set(SOURCES)
    assert {"sglang_csa2/tools/checks", "sglang_csa2/tools/recorded"} <= set(SOURCES)


def judged(source: str, allowed: set[str]) -> tuple[list, set[str]]:
    """What a source does that is not allowed, and what it is allowed and does not do."""
    found = findings(source)
    refused = [finding for finding in found if finding.key not in allowed - {UNSAFE_LOAD}]
    return refused, allowed - {finding.key for finding in found}


@pytest.mark.parametrize(
    ("source", "key"),
    [
        ("import pickle", "pickle"),
        ("import numpy, pickle as p", "pickle"),
        ("from pickle import loads", "pickle"),
        ("def f():\n    from cloudpickle import load", "cloudpickle"),
        ("import subprocess", "subprocess"),
        ("from subprocess import run as go", "subprocess"),
        ("import urllib.request as web", "urllib"),
        ("from urllib.request import urlopen", "urllib"),
        ("from sglang_csa2.tools.checks import urllib", "urllib"),
        ("import shutil\nshutil.os.system('ls')", "shutil.os.system"),
        ("import os\nos.system('ls')", "os.system"),
        ("import os\nrun = os.system", "os.system"),
        ("import os as o\nrun = o.execvp", "os.execvp"),
        ("from os import system", "os.system"),
        ("from os import popen as p", "os.popen"),
        ("from os import *", "os.*"),
        ("import os\ngetattr(os, 'system')('ls')", ".system"),
        ("import importlib\nimportlib.import_module(name)", "importlib.import_module"),
        ("eval(text)", "eval"),
        ("def f(text, eval=eval):\n    return eval(text)", "eval"),
        ("import sys\nsys.modules['subprocess'].run(c)", "subprocess"),
        ("import asyncio\nasyncio.create_subprocess_shell(c)", "asyncio"),
        ("from concurrent.futures import ProcessPoolExecutor", "concurrent.futures.ProcessPoolExecutor"),
        ("import importlib.machinery as m\nm.SourceFileLoader(n, p)", "importlib.machinery.SourceFileLoader"),
        ("import operator\noperator.attrgetter('system')(o)", "operator.attrgetter"),
        ("import torch.distributed as d\nd.recv_object_list(x)", "torch.distributed.recv_object_list"),
        ("def f(s):\n    return s.recv_pyobj()", ".recv_pyobj"),
        ("def f(m, p):\n    return m.from_pretrained(p, trust_remote_code=True)", "trust_remote_code"),
        ("import os\nos.unlink(p)", "os.unlink"),
        ("run = exec", "exec"),
        ("list(map(__import__, names))", "__import__"),
        ("open(path)", "open"),
        ("def f(path):\n    return path.open()", ".open"),
        ("def f(input):\n    pass\ninput()", "input"),
        ("def f(library):\n    return library.load", ".load"),
        ("import torch\ntorch.load(path)", UNSAFE_LOAD),
        ("import torch\ntorch.load(path, weights_only=False)", UNSAFE_LOAD),
        ("import torch\ntorch.load(path, weights_only=safe)", UNSAFE_LOAD),
        ("import torch as t\nt.serialization.load(path)", UNSAFE_LOAD),
        ("from torch import load\nload(path)", UNSAFE_LOAD),
        ("from torch import load as read\nlist(map(read, paths))", UNSAFE_LOAD),
        ("import torch\nread = torch.load", UNSAFE_LOAD),
        ("import torch\ntorch.load(path, weights_only=True)", "torch.load"),
    ],
)
def test_the_scan_sees(source, key):
    refused, _ = judged(source, set())
    assert key in {finding.key for finding in refused}


@pytest.mark.parametrize(
    "source",
    [
        "import triton.language as tl\ntl.load(pointer)",
        "from triton import language as tl\ntl.load(pointer)",
        "def silu(original, input):\n    return original(input)",
        "import os\nos.environ.get('A'), os.getpid()",
        "import json\njson.dumps({})",
        "import torch\ntorch.save({}, path)",
        "def load(path):\n    return path\nload(1)",
    ],
)
def test_the_scan_lets_pass(source):
    assert findings(source) == []


def test_an_allowance_holds_for_its_own_key_and_must_be_needed():
    source = "import torch, urllib.request\ntorch.load(path, weights_only=True)"
    assert judged(source, {"urllib", "torch.load"}) == ([], set())
    assert [finding.key for finding in judged(source, {"torch.load"})[0]] == ["urllib"]
    assert judged(source, {"urllib", "torch.load", "subprocess"}) == ([], {"subprocess"})
    # No allowance makes an unpickling torch.load right.
    unsafe = "import torch\ntorch.load(path)"
    assert [finding.key for finding in judged(unsafe, {"torch.load", UNSAFE_LOAD})[0]] == [UNSAFE_LOAD]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 1 << 40),
        ("num_hidden_layers", 4097),
        ("num_hidden_layers", -1),
        ("num_nextn_predict_layers", 1 << 40),
        ("num_attention_heads", 1 << 62),
        ("index_n_heads", 0),
        ("index_topk", 1 << 31),
        ("candidate_topk_blocks", 1 << 33),
        ("candidate_block_size", 1 << 21),
        ("head_dim", 1 << 30),
        ("sliding_window", 1 << 30),
        ("compress_ratios", [1] * 9000),
        ("kv_source_layer_ids", list(range(9000))),
        ("index_topk", float("inf")),
        ("index_topk", "512"),
    ],
)
def test_sizes_out_of_range_are_refused_before_anything_is_allocated(field, value):
    config = TINY | {field: value}
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=field):
            LayerPlan.from_config(Csa2Config.from_hf(config))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
