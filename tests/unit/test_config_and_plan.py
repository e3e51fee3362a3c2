"""The layer plan from the config, and every rule that a config can break."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_csa2.config import ConfigError, Csa2Config
from sglang_csa2.layer_plan import LayerPlan, Role
from sglang_csa2.layout import INDEX_K, MAIN_KV, SWA_KV, global_bytes_per_token, swa_bytes_per_slot

CONFIGS = Path(__file__).parents[2] / "configs"
FLASH = json.loads((CONFIGS / "deepseek-v4.1-flash.json").read_text())
TINY = json.loads((CONFIGS / "tiny-dsv41" / "config.json").read_text())


def flash(**changes) -> dict:
    config = copy.deepcopy(FLASH)
    config["text_config"].update(changes)
    return config


def plan_of(config) -> LayerPlan:
    return LayerPlan.from_config(Csa2Config.from_hf(config))


def layers_with(plan: LayerPlan, role: Role) -> list[int]:
    return [layer.layer_id for layer in plan.layers if layer.role is role]


def test_flash_roles():
    plan = plan_of(FLASH)
    assert layers_with(plan, Role.SWA_ONLY) == [0, 1]
    assert layers_with(plan, Role.FULL) == [2, 8, 14, 20]
    assert layers_with(plan, Role.REINDEX) == [24, 28, 32, 36]
    assert len(layers_with(plan, Role.REUSE)) == 30
    assert [plan[i].kv_source for i in (3, 9, 19, 20, 39)] == [2, 8, 14, 20, 20]
    assert [plan[i].index_source for i in (3, 9, 23, 25, 39)] == [2, 8, 20, 24, 36]
    assert [layer.layer_id for layer in plan.layers if layer.is_candidate_source] == [20]
    assert [layer.layer_id for layer in plan.layers if layer.uses_candidates] == [24, 28, 32, 36]
    assert plan.config.candidate_pool_entries == 16384


def test_flash_bytes():
    plan = plan_of(FLASH)
    assert global_bytes_per_token(plan) == 890
    assert (SWA_KV.bytes, MAIN_KV.bytes, INDEX_K.bytes) == (528, 288, 68)
    assert swa_bytes_per_slot(plan) == 40 * 528


def test_objects_and_flat_configs_read_alike():
    assert Csa2Config.from_hf(SimpleNamespace(**TINY)) == Csa2Config.from_hf(TINY)
    flattened = {key: value for key, value in FLASH.items() if key != "text_config"} | FLASH["text_config"]
    assert Csa2Config.from_hf(flattened) == Csa2Config.from_hf(FLASH)


def test_ratios_may_leave_the_draft_layers_out():
    assert Csa2Config.from_hf(flash(compress_ratios=[0, 0] + [2] * 18 + [1] * 20)) == Csa2Config.from_hf(FLASH)


def test_no_candidate_source():
    config = Csa2Config.from_hf(flash(candidate_source_layer_id=-1))
    assert config.candidate_source_layer_id is None
    assert not any(layer.uses_candidates for layer in LayerPlan.from_config(config).layers)


def test_swa_only_layers_have_no_source():
    plan = plan_of(FLASH)
    assert plan.source_layer_of(21) == 20
    with pytest.raises(KeyError, match="window only"):
        plan.source_layer_of(0)


RATIOS = FLASH["text_config"]["compress_ratios"]


@pytest.mark.parametrize(
    ("field", "changes", "rule"),
    [
        ("compress_ratios", {"compress_ratios": RATIOS[:41]}, "num_hidden_layers"),
        ("compress_ratios", {"compress_ratios": [*RATIOS[:40], 0, 1, 0]}, "must be 0"),
        ("compress_ratios", {"compress_ratios": [4, *RATIOS[1:]]}, "ratios"),
        ("compress_ratios", {"compress_ratios": [*RATIOS[:10], 1, *RATIOS[11:]]}, "that layer's ratio"),
        ("compress_ratios", {"compress_ratios": "0,0,2"}, "list of integers"),
        ("compress_ratios", {"compress_ratios": [0.5] * 40}, "list of integers"),
        ("kv_source_layer_ids", {"kv_source_layer_ids": [8, 14, 20]}, "before any source"),
        ("kv_source_layer_ids", {"kv_source_layer_ids": [2, 8, 14, 20, 41]}, "draft layers"),
        ("kv_source_layer_ids", {"kv_source_layer_ids": [-1, 2, 8, 14, 20]}, "hidden layer"),
        ("kv_source_layer_ids", {"kv_source_layer_ids": [8, 2, 14, 20]}, "increasing"),
        ("kv_source_layer_ids", {"kv_source_layer_ids": [1, 2, 8, 14, 20]}, "ratio of 1 or 2"),
        ("index_source_layer_ids", {"index_source_layer_ids": [2, 8, 20, 24]}, "also be an index source"),
        ("index_source_layer_ids", {"index_source_layer_ids": [2, 2, 8, 14, 20]}, "increasing"),
        ("candidate_source_layer_id", {"candidate_source_layer_id": 21}, "index_source_layer_ids"),
        ("candidate_source_layer_id", {"candidate_source_layer_id": 14}, "must read its cache"),
        ("candidate_topk_blocks", {"candidate_topk_blocks": 0}, "between 1"),
        ("candidate_block_size", {"candidate_block_size": 0}, "between 1"),
        ("candidate_block_size", {"candidate_block_size": None}, "missing"),
        ("index_topk", {"index_topk": None}, "missing"),
        ("index_topk", {"index_topk": True}, "integer"),
        ("head_dim", {"head_dim": 576}, "must be 512"),
        ("index_head_dim", {"index_head_dim": 64}, "must be 128"),
        ("num_hidden_layers", {"num_hidden_layers": 1 << 40}, "between 1"),
        ("sliding_window", {"sliding_window": 64}, "must be 128: the host"),
    ],
)
def test_broken_configs_are_named(field, changes, rule):
    with pytest.raises(ConfigError, match=rule) as error:
        Csa2Config.from_hf(flash(**changes))
    assert error.value.field == field
    assert field in str(error.value)
