"""The planner without a host: the known figures, and what it answers to arguments."""

from __future__ import annotations

import json

import pytest
from served import REPOSITORY, TINY

from sglang_csa2.__main__ import main
from sglang_csa2.tools.budget import CSA2, GIB, STOCK, Budget, Serving
from sglang_csa2.tools.plan import read_model

FLASH = REPOSITORY / "configs" / "deepseek-v4.1-flash.json"
SERVING = Serving(max_running_requests=64, context_length=1 << 20)


@pytest.fixture(scope="module")
def flash():
    return read_model(FLASH)[1]


def plan_json(capsys, *arguments: str) -> dict:
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_bytes_of_the_released_model(flash):
    """890 and 1,632.5 bytes of global KV (spec 2.12); a window slot is 528 or 585 bytes in each of 40 layers."""
    mine, stock = Budget(flash, CSA2, SERVING), Budget(flash, STOCK, SERVING)
    assert (mine.global_per_token, stock.global_per_token) == (890, 1632.5)
    assert (mine.swa_per_slot, stock.swa_per_slot) == (40 * 528, 40 * 585)
    assert mine.pending_per_request == 3 * 2 * 1024 * 4


def test_roles_add_up(flash):
    budget = Budget(flash, CSA2, SERVING)
    roles = budget.roles()
    assert sorted(layer for cost in roles for layer in cost.layers) == list(range(40))
    assert sum(cost.main_kv_per_token + cost.index_k_per_token for cost in roles) == budget.global_per_token
    assert sum(cost.swa_per_slot for cost in roles) == budget.swa_per_slot
    assert sum(cost.pending_per_request for cost in roles) == budget.pending_per_request
    assert {cost.role for cost in roles if cost.main_kv_per_token} == {"full"}


def test_what_fits_fills_the_budget(flash):
    """The tokens that fit, with every reserve, stay inside the budget; one more page does not."""
    budget, kv = Budget(flash, CSA2, SERVING), 60 * GIB
    fixed, tokens = budget.swa_bytes + budget.pending_bytes, budget.tokens(kv)
    assert fixed + tokens * budget.global_per_token + budget.padding_bytes(tokens) <= kv
    more = tokens + 256
    assert fixed + more * budget.global_per_token + budget.padding_bytes(more) > kv
    assert budget.tokens(budget.swa_bytes) == 0


def test_gpu_by_name(capsys):
    """Tensor parallelism divides the weights and not the cache."""
    common = ["--model", str(FLASH), "--gpu", "h200", "--context", "1048576", "--concurrency", "64"]
    eight, four = (plan_json(capsys, *common, "--tp", ranks) for ranks in ("8", "4"))
    # 276 GiB of matrices and 189 GiB of Engram tables, and some that every rank keeps.
    assert 58 < eight["memory"]["weights"] / GIB < 60
    assert four["memory"]["kv"] < eight["memory"]["kv"]
    mine, stock = eight["layouts"]
    assert mine["bytes_per_token"] == four["layouts"][0]["bytes_per_token"] == 890
    assert 1.8 < mine["max_total_num_tokens"] / stock["max_total_num_tokens"] < 1.9
    assert mine["requests_at_context"] == 64 > stock["requests_at_context"]
    assert any("estimate" in note for note in eight["notes"])


def test_table(capsys):
    assert main(["plan", "--model", str(FLASH), "--gpu", "h200", "--tp", "8"]) == 0
    table = capsys.readouterr().out
    for text in ("890.0 B", "1,632.5 B", "reindex", "tokens that fit", "pending pairs"):
        assert text in table


def test_weights_of_files(tiny_model, capsys):
    report = plan_json(capsys, "--model", str(tiny_model), "--gpu-gib", "24")
    size = (tiny_model / "model.safetensors").stat().st_size
    assert report["memory"]["weights"] == size and report["memory"]["weights_source"] == "1 files"


def test_no_room(capsys):
    report = plan_json(capsys, "--model", str(FLASH), "--gpu", "h100", "--tp", "1")
    assert report["layouts"][0]["max_total_num_tokens"] == 0
    assert any("no room" in note for note in report["notes"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gpu", "h201"], "known are b200, h100, h20, h200"),
        ([], "name a --gpu"),
        (["--gpu", "h200", "--tp", "0"], "--tp is 0: it must be at least 1"),
    ],
)
def test_bad_arguments_are_named(capsys, arguments, says):
    assert main(["plan", "--model", str(FLASH), *arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_missing_model_is_named(capsys, tmp_path):
    assert main(["plan", "--model", str(tmp_path), "--gpu", "h200"]) == 2
    assert "folder with config.json" in capsys.readouterr().err


def test_a_broken_config_is_named(capsys, tmp_path):
    config = json.loads((TINY / "config.json").read_text()) | {"head_dim": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", "--model", str(tmp_path), "--gpu", "h200"]) == 2
    assert "'head_dim' is 256" in capsys.readouterr().err
