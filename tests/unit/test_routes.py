"""The table of routes on machines that are not here, and the doctor on the one that is."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from sglang_csa2 import envs, routes
from sglang_csa2.__main__ import main
from sglang_csa2.config import Csa2Config
from sglang_csa2.indexer import indexer_for
from sglang_csa2.layer_plan import LayerPlan
from sglang_csa2.ops import ops_for
from sglang_csa2.tools import doctor

H200, B200, A100 = (
    routes.Machine("cuda", capability, name) for capability, name in ((90, "H200"), (100, "B200"), (80, "A100"))
)
CPU = routes.Machine("cpu", 0, "CPU")
TINY = json.loads((Path(__file__).parents[2] / "configs" / "tiny-dsv41" / "config.json").read_text())
MACHINES = (CPU, A100, H200, B200)
FLAGS = [routes.Flags(*values) for values in itertools.product(envs.LAYOUTS, envs.DECODE_ATTENTIONS, (False, True))]


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    """Every library and nvcc are there; DeepGEMM itself is not imported."""
    for kernel, capabilities in ((routes.cuda_build, (90,)), (routes.deep_gemm_scores, (100, 103))):
        monkeypatch.setattr(
            kernel, "missing", lambda one, of=capabilities: None if one in of else f"not on {one / 10:.1f}"
        )
    monkeypatch.setattr(routes.importlib.util, "find_spec", lambda name: name)


def served(machine: routes.Machine, flags: routes.Flags) -> bool:
    """The rule in other words."""
    attention = flags.decode_attention
    if flags.deep_gemm and machine is not B200:
        return False
    if machine is CPU:
        return attention == "auto"
    if flags.layout == "v4":
        return machine is not A100 and attention in ("auto", "flashmla")
    return attention in ("auto", "triton") or (attention, machine) in (("cuda", H200), ("flashmla", B200))


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_every_combination_is_served_or_refused_with_a_reason(machine, flags):
    found = routes.problems(machine, flags)
    assert (not found) == served(machine, flags)
    if found:
        with pytest.raises(routes.RouteError, match="csa2 cannot serve here"):
            routes.choose(machine, flags)
        return
    chosen = routes.choose(machine, flags)
    assert tuple(chosen) == routes.OPERATIONS
    for choice in chosen.values():
        assert choice.reason and choice.route.problem(machine, flags.layout) is None
    if flags.decode_attention != "auto":
        assert chosen[routes.DECODE].route.name == flags.decode_attention
    assert (chosen[routes.SCAN].route.name == "deep_gemm") == flags.deep_gemm


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_what_is_built_is_what_was_chosen(machine, flags):
    """The route of every operation, read off the functions that were put in its place."""
    if not served(machine, flags):
        return
    pytest.importorskip("triton")
    plan = LayerPlan.from_config(Csa2Config.from_hf(TINY))
    chosen = {op: choice.route.name for op, choice in routes.choose(machine, flags, plan.config).items()}
    ops = ops_for(machine.device, chosen[routes.DECODE], chosen[routes.PREFILL])
    built = ops.in_place() | indexer_for(plan, machine.device, chosen[routes.SCAN]).in_place()
    assert built == chosen


def test_a_stranger_has_no_route():
    assert routes.route_of(json) == "json" and routes.route_of(json.dumps) == "json"
    assert routes.route_of(served) == __name__


def test_auto_takes_the_first_that_is_there_and_says_what_it_passed(monkeypatch):
    monkeypatch.setitem(routes.AUTO_DECODE_ATTENTION, "v41", ("cuda", "triton"))
    assert routes.choose(H200, routes.Flags())[routes.DECODE].route.name == "cuda"
    choice = routes.choose(A100, routes.Flags())[routes.DECODE]
    assert choice.route.name == "triton" and "not cuda: not on 8.0" in choice.reason


def test_the_default_has_a_route_on_every_card():
    for layout, names in routes.AUTO_DECODE_ATTENTION.items():
        for machine in (A100, H200, B200):
            flags = routes.Flags(layout)
            assert routes.problems(machine, flags) or routes.choose(machine, flags)[routes.DECODE].route.name in names


@pytest.mark.parametrize(
    ("name", "value"),
    [(envs.KV_LAYOUT, "v5"), (envs.DECODE_ATTENTION, "fast"), (envs.DEEP_GEMM_INDEXER, "maybe")],
)
def test_unknown_values(name, value):
    with pytest.raises(envs.EnvError, match=f"{name} is '{value}'"):
        routes.Flags.from_env({name: value})
    assert routes.Flags.from_env({name: ""}) == routes.Flags()


def test_doctor_on_the_cpu(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_host_problems", list)
    assert main(["doctor", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[1] == "csa2 can serve here." and "not run on hardware" in text
    assert "missing: index scan through deep_gemm (v41/v4): it is for GPUs, not cpu. It would bring" in text
    assert main(["doctor", "--device", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["routes"]) == len(routes.ROUTES) and report["problems"] == []


@pytest.mark.parametrize(
    ("machine", "env", "problem"),
    [
        (H200, {envs.DEEP_GEMM_INDEXER: "1"}, "not on 9.0"),
        (H200, {envs.KV_LAYOUT: "v5"}, "SGLANG_CSA2_KV_LAYOUT is 'v5'"),
        (A100, {envs.KV_LAYOUT: "v4"}, "this card has 8.0"),
        (routes.Machine("cuda", 0, "no CUDA device"), {}, "attention, decode: cuda: no CUDA device"),
    ],
    ids=str,
)
def test_doctor_says_why_not(monkeypatch, machine, env, problem, capsys):
    monkeypatch.setattr(doctor, "_host_problems", list)
    monkeypatch.setattr(routes.Machine, "here", lambda device: machine)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", "--device", "cuda"]) == 1
    text = capsys.readouterr().out
    assert text.index(problem) < text.index("\ncsa2 cannot serve here.\n")


def test_doctor_without_the_host(monkeypatch, capsys):
    def absent():
        raise doctor.importlib.metadata.PackageNotFoundError("sglang")

    monkeypatch.setattr(doctor.host, "installed_version", absent)
    assert main(["doctor", "--device", "cpu"]) == 1
    assert "sglang is not installed: pip install sglang==0.5.23" in capsys.readouterr().out
