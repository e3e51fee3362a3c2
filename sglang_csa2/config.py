"""The attention half of a DeepSeek-V4.1 config, read once and checked.

`Csa2Config.from_hf` is the only reader of the model's HF config: it takes the
served object, a plain dict or a `config.json` with a nested `text_config`, and
either returns a frozen value that obeys every rule of CSA2 (spec 1a, 1c) or raises
`ConfigError` with the field, its value and the rule it breaks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# The record formats (layout.py) fix these widths: 512 latent dims of which the last
# 64 are rotated, and 128-wide index heads. A model with others needs other records.
HEAD_DIM = 512
ROPE_HEAD_DIM = 64
INDEX_HEAD_DIM = 128
SLIDING_WINDOW = 128
SUPPORTED_RATIOS = (0, 1, 2)
# Far above any model of this family; a config beyond them is damaged or hostile, and
# refusing it here comes before anything is allocated by its numbers.
MAX_LAYERS = 4096
MAX_WIDTH = 1 << 20

_MISSING = object()


class ConfigError(ValueError):
    """A config that CSA2 cannot serve: names the field, the value and the rule."""

    def __init__(self, field: str, value: object, rule: str):
        self.field, self.value, self.rule = field, value, rule
        super().__init__(f"config field {field!r} is {value!r}: {rule}")


@dataclass(frozen=True)
class Csa2Config:
    """What CSA2 needs of a model. Names keep the config's spellings."""

    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    sliding_window: int
    compress_ratios: tuple[int, ...]  # one per hidden layer; draft entries are left aside
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int | None
    candidate_topk_blocks: int
    candidate_block_size: int
    num_nextn_predict_layers: int

    @classmethod
    def from_hf(cls, hf_config: Any) -> Csa2Config:
        """Read and check a config.

        Args:
            hf_config: a `PretrainedConfig`-like object or a mapping; a nested `text_config` wins over
                the top level.

        Raises:
            ConfigError: a field is missing or breaks a rule.
        """
        read = _Reader(hf_config)
        layers = read.count("num_hidden_layers", most=MAX_LAYERS)
        drafts = read.count("num_nextn_predict_layers", least=0, most=MAX_LAYERS, default=0)
        candidate_source = read.integer("candidate_source_layer_id", default=-1)
        has_candidates = candidate_source >= 0
        config = cls(
            num_hidden_layers=layers,
            num_attention_heads=read.count("num_attention_heads", most=MAX_WIDTH),
            head_dim=read.exactly("head_dim", HEAD_DIM),
            qk_rope_head_dim=read.exactly("qk_rope_head_dim", ROPE_HEAD_DIM),
            sliding_window=read.exactly("sliding_window", SLIDING_WINDOW, "the host's late-layer tail is fixed to it"),
            compress_ratios=_hidden_ratios(read.integers("compress_ratios"), layers, drafts),
            kv_source_layer_ids=read.integers("kv_source_layer_ids"),
            index_source_layer_ids=read.integers("index_source_layer_ids"),
            index_n_heads=read.count("index_n_heads", most=MAX_WIDTH),
            index_head_dim=read.exactly("index_head_dim", INDEX_HEAD_DIM),
            index_topk=read.count("index_topk", most=MAX_WIDTH),
            candidate_source_layer_id=candidate_source if has_candidates else None,
            candidate_topk_blocks=read.count("candidate_topk_blocks", most=MAX_WIDTH) if has_candidates else 0,
            candidate_block_size=read.count("candidate_block_size", most=MAX_WIDTH) if has_candidates else 0,
            num_nextn_predict_layers=drafts,
        )
        _check_sources(config)
        return config

    @property
    def candidate_pool_entries(self) -> int:
        """Compressed entries a full candidate pool covers (16,384 for V4.1-Flash); 0 without one."""
        return self.candidate_topk_blocks * self.candidate_block_size


class _Reader:
    """Typed access to the text config, in whichever of its shapes it comes."""

    def __init__(self, hf_config: Any):
        text = _get(hf_config, "text_config")
        self._levels = [level for level in (text, hf_config) if level is not _MISSING and level is not None]

    def raw(self, field: str, default: object = _MISSING) -> Any:
        for level in self._levels:
            value = _get(level, field)
            if value is not _MISSING and value is not None:
                return value
        if default is _MISSING:
            raise ConfigError(field, None, "the field is missing and CSA2 cannot be planned without it")
        return default

    def integer(self, field: str, default: object = _MISSING) -> int:
        value = self.raw(field, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(field, value, "must be an integer")
        return value

    def count(self, field: str, *, most: int, least: int = 1, default: object = _MISSING) -> int:
        value = self.integer(field, default)
        if not least <= value <= most:
            raise ConfigError(field, value, f"must be between {least} and {most}")
        return value

    def exactly(
        self, field: str, expected: int, why: str = "the packed records are defined for that width only"
    ) -> int:
        value = self.integer(field)
        if value != expected:
            raise ConfigError(field, value, f"must be {expected}: {why}")
        return value

    def integers(self, field: str) -> tuple[int, ...]:
        value = self.raw(field)
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ConfigError(field, value, "must be a list of integers")
        if any(isinstance(item, bool) or not isinstance(item, int) for item in value):
            raise ConfigError(field, value, "must be a list of integers")
        if len(value) > 2 * MAX_LAYERS:
            raise ConfigError(field, f"{len(value)} entries", f"must have at most {2 * MAX_LAYERS} entries")
        return tuple(value)


def _get(level: Any, field: str) -> Any:
    if isinstance(level, Mapping):
        return level.get(field, _MISSING)
    return getattr(level, field, _MISSING)


def _hidden_ratios(ratios: tuple[int, ...], layers: int, drafts: int) -> tuple[int, ...]:
    """The hidden layers' ratios; the trailing draft entries must be SWA-only (spec 1a: 43 for 40 layers)."""
    field = "compress_ratios"
    if len(ratios) not in (layers, layers + drafts):
        raise ConfigError(
            field,
            f"{len(ratios)} entries",
            f"must hold num_hidden_layers ({layers}) or num_hidden_layers + num_nextn_predict_layers "
            f"({layers + drafts}) entries",
        )
    if any(ratios[layers:]):
        raise ConfigError(field, list(ratios[layers:]), "the trailing draft-layer entries must be 0")
    for layer_id, ratio in enumerate(ratios[:layers]):
        if ratio not in SUPPORTED_RATIOS:
            raise ConfigError(field, ratio, f"layer {layer_id} must have one of the ratios {SUPPORTED_RATIOS}")
    return ratios[:layers]


def _check_sources(config: Csa2Config) -> None:
    for field in ("kv_source_layer_ids", "index_source_layer_ids"):
        _check_source_ids(config, field, getattr(config, field))
    extra = sorted(set(config.kv_source_layer_ids) - set(config.index_source_layer_ids))
    if extra:
        raise ConfigError(
            "index_source_layer_ids",
            list(config.index_source_layer_ids),
            f"every kv source must also be an index source (a Full layer chooses in its own cache); missing {extra}",
        )
    for layer_id, ratio in enumerate(config.compress_ratios):
        if ratio:
            _check_reader(config, layer_id, ratio)
    if config.candidate_source_layer_id is not None:
        _check_candidates(config, config.candidate_source_layer_id)


def _check_source_ids(config: Csa2Config, field: str, ids: tuple[int, ...]) -> None:
    if list(ids) != sorted(set(ids)):
        raise ConfigError(field, list(ids), "must be strictly increasing")
    for layer_id in ids:
        if layer_id < 0 or layer_id >= config.num_hidden_layers:
            raise ConfigError(
                field,
                layer_id,
                f"must be a hidden layer (0 to {config.num_hidden_layers - 1}); draft layers attend to their "
                "window only and are no sources",
            )
        if config.compress_ratios[layer_id] == 0:
            raise ConfigError(field, layer_id, "a source layer must have a compress ratio of 1 or 2, not 0")


def _check_reader(config: Csa2Config, layer_id: int, ratio: int) -> None:
    earlier = [source for source in config.kv_source_layer_ids if source <= layer_id]
    if not earlier:
        raise ConfigError(
            "kv_source_layer_ids",
            list(config.kv_source_layer_ids),
            f"layer {layer_id} (ratio {ratio}) reads compressed KV before any source has written it",
        )
    source_ratio = config.compress_ratios[earlier[-1]]
    if source_ratio != ratio:
        raise ConfigError(
            "compress_ratios",
            ratio,
            f"layer {layer_id} reads the cache of layer {earlier[-1]}, so it must have that layer's ratio "
            f"({source_ratio})",
        )


def _check_candidates(config: Csa2Config, source: int) -> None:
    field = "candidate_source_layer_id"
    if source not in config.index_source_layer_ids:
        raise ConfigError(field, source, f"must be one of index_source_layer_ids {list(config.index_source_layer_ids)}")
    foreign = [kv for kv in config.kv_source_layer_ids if kv > source]
    if foreign:
        raise ConfigError(
            field,
            source,
            f"the layers after it choose inside its pool, so they must read its cache; layers {foreign} start others",
        )
