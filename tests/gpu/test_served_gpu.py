"""The 64-head tiny model served on a GPU against the golden values, beside the host's own `dsv4` in the same run."""

from __future__ import annotations

import contextlib
import re
import statistics
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("sglang", reason="the host stack is not installed: only the kernel tests run here")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from served import CASE_BOUND_64H, MEAN_BOUND_64H, golden_differences, serve

from sglang_csa2.kernels import cuda_build, flash_mla_decode
from sglang_csa2.kernels.triton_records import compute_capability

pytestmark = pytest.mark.server
NAME = "tiny-dsv41-64h"
SERVERS = {
    "csa2": ("csa2", "--skip-tokenizer-init"),
    "csa2, no graphs, chunks of 256": (
        "csa2", "--skip-tokenizer-init", "--cuda-graph-backend-decode", "disabled", "--chunked-prefill-size", "256",
    ),
    "csa2, replay": ("csa2", "--skip-tokenizer-init", "--enable-decoder-swa-bounded-replay"),
    "csa2, v4": ("csa2", "--skip-tokenizer-init"),
    "dsv4": ("dsv4", "--skip-tokenizer-init"),
}  # fmt: skip
ENVIRONMENT = {"csa2, v4": {"SGLANG_CSA2_KV_LAYOUT": "v4"}}
# On cards that FlashMLA's V4 kernels are not for, that server would refuse to start.
if flash_mla_decode.missing(compute_capability(torch.device("cuda")), "v4"):
    del SERVERS["csa2, v4"]


@pytest.fixture(scope="module")
def servers(tiny_model_64h):
    """All of them side by side, because most of the time is their start."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(SERVERS)) as executor:

        def start(name, backend, *arguments):
            options = {"model": tiny_model_64h, "device": "cuda", "backend": backend, "env": ENVIRONMENT.get(name)}
            return stack.enter_context(serve(*arguments, **options))

        started = {name: executor.submit(start, name, *arguments) for name, arguments in SERVERS.items()}
        yield {name: future.result() for name, future in started.items()}


@pytest.fixture(scope="module")
def differences(servers):
    measured = {name: golden_differences(server, NAME)[0] for name, server in servers.items() if "replay" not in name}
    for name, cases in measured.items():
        print(f"\n{name}: mean {statistics.fmean(cases):.4f}, worst {max(cases):.4f}")
    return measured


@pytest.mark.parametrize("name", [name for name in SERVERS if name.startswith("csa2") and "replay" not in name])
def test_golden_values(differences, name):
    assert max(differences[name]) <= CASE_BOUND_64H
    assert statistics.fmean(differences[name]) <= MEAN_BOUND_64H


def test_not_farther_from_the_model_than_the_hosts_backend(differences):
    assert statistics.fmean(differences["csa2"]) <= 1.1 * statistics.fmean(differences["dsv4"])


def test_graphs_were_on_and_off(servers):
    for name, used in (("csa2", "True"), ("csa2, no graphs, chunks of 256", "False")):
        # Long enough for the host's log of decode steps.
        servers[name].generate([5, 6, 7], 90)
        assert f"cuda graph: {used}" in servers[name].log, name


def test_routes_are_logged(servers):
    assert "flash_mla_sparse_fwd" in servers["csa2"].log or "packed records" in servers["csa2"].log
    own = "cuda (ours" if cuda_build.missing(compute_capability(torch.device("cuda"))) is None else "triton (triton"
    for operation in ("attention, decode", "index scan", "index candidates", "top-k"):
        assert f"csa2 route, {operation}: {own}" in servers["csa2"].log
    if "csa2, v4" in servers:
        assert "csa2 route, attention, decode: flashmla (sgl-flash-mla" in servers["csa2, v4"].log


@pytest.mark.skipif("csa2, v4" not in SERVERS, reason="FlashMLA's V4 kernels do not run on this card")
def test_v4_costs_what_stock_costs(servers, differences):
    mine, stock = (
        float(re.search(r"bytes_per_full_token=([\d.]+)", servers[name].log).group(1)) for name in ("csa2, v4", "dsv4")
    )
    assert mine == stock
    assert statistics.fmean(differences["csa2, v4"]) <= 1.1 * statistics.fmean(differences["dsv4"])


def test_replay_answers_short_prompts_exactly(servers):
    """Up to 128 tokens nothing is approximated; beyond, the answer moves, or replay did not run."""
    from served import golden_cases, log_probabilities

    moved = []
    for case in golden_cases(NAME):
        answer = log_probabilities(servers["csa2, replay"], case["input_ids"], case["top20_ids"])
        pairs = zip(answer["logprobs"], case["top20_logprobs"], strict=True)
        difference = statistics.fmean(abs(mine - golden) for mine, golden in pairs)
        if len(case["input_ids"]) <= 128:
            assert difference <= CASE_BOUND_64H
        else:
            moved.append(difference)
    assert 0.01 < max(moved) < 0.6


def test_bytes_per_token_are_little_over_half_of_the_hosts(servers):
    ours, theirs = (
        float(re.search(r"bytes_per_full_token=([\d.]+)", servers[name].log).group(1)) for name in ("csa2", "dsv4")
    )
    assert ours == 534.0 and theirs / ours > 1.75
