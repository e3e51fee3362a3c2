"""Nothing that a request or a checkpoint says is run, unpickled or allocated unchecked."""

from __future__ import annotations

import ast
import json
import tracemalloc
from pathlib import Path

import pytest

from sglang_csa2.config import ConfigError, Csa2Config
from sglang_csa2.layer_plan import LayerPlan

REPOSITORY = Path(__file__).parents[2]
SOURCES = sorted(path for name in ("sglang_csa2", "kernels", "patches") for path in (REPOSITORY / name).glob("*.py"))
TINY = json.loads((REPOSITORY / "configs" / "tiny-dsv41" / "config.json").read_text())
MODULES = {
    "pickle", "marshal", "shelve", "dill", "cloudpickle", "subprocess", "pty", "socket", "ssl", "urllib", "http",
    "requests", "httpx", "aiohttp", "ftplib", "smtplib", "xmlrpc", "ctypes", "multiprocessing", "shutil", "tempfile",
}  # fmt: skip
# What none of a request's or a checkpoint's data reaches: each with why it is there.
ALLOWED = {
    # Runs nvcc on its own source in a scratch folder and loads the result.
    "kernels/cuda_build": {"subprocess", "ctypes", "shutil", "tempfile"},
    # Load what that built.
    "kernels/cuda_index_decode": {"ctypes", "load"},
    "kernels/cuda_index_scores": {"ctypes", "load"},
    "kernels/cuda_sparse_attention": {"ctypes", "load"},
    "kernels/cuda_topk": {"ctypes", "load"},
    # The JSON of a folder that the user of `verify` names.
    "sglang_csa2/reference_model": {"loads"},
}
CALLS = {"eval", "exec", "compile", "__import__", "open", "input"}
ATTRIBUTES = {"system", "popen", "spawnl", "spawnv", "execv", "execvp", "loads", "load", "from_file", "load_state_dict"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_no_pickle_eval_network_or_shell(path):
    allowed = ALLOWED.get(f"{path.parent.name}/{path.stem}", set())
    modules, attributes = MODULES - allowed, ATTRIBUTES - allowed
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & modules
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.module.split(".")[0] not in modules
        elif isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            # tl.load reads memory of a kernel's own arguments.
            of = node.func.value if isinstance(node.func, ast.Attribute) else None
            in_kernel = isinstance(of, ast.Name) and of.id == "tl"
            assert name not in CALLS, f"{path.name}:{node.lineno} calls {name}"
            if of is not None and not in_kernel:
                assert node.func.attr not in attributes, f"{path.name}:{node.lineno} calls .{node.func.attr}"


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
