"""Who keeps the cache and who chooses, for every layer: static, pure Python.

No config field names a role; it follows from the two id lists (spec 1c):

| role     | keeps main KV and index K | chooses the Top-K   | reads              |
|----------|---------------------------|---------------------|--------------------|
| SWA_ONLY | no                        | no                  | its window         |
| FULL     | yes                       | yes                 | its own cache      |
| REINDEX  | no                        | yes, anew           | its kv_source      |
| REUSE    | no                        | no, its source's    | its kv_source      |

The candidate source also publishes a pool of blocks; every later index layer (a
*consumer*) chooses only inside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sglang_csa2.config import Csa2Config


class Role(Enum):
    """What a layer does beside attending to its window."""

    SWA_ONLY = "swa_only"
    FULL = "full"
    REINDEX = "reindex"
    REUSE = "reuse"


@dataclass(frozen=True)
class LayerSpec:
    """One layer's place in the plan. `kv_source` and `index_source` are None for SWA-only layers."""

    layer_id: int
    role: Role
    ratio: int
    kv_source: int | None
    index_source: int | None
    is_candidate_source: bool
    pool_source: int | None  # the candidate source in whose pool it chooses

    @property
    def uses_candidates(self) -> bool:
        return self.pool_source is not None

    @property
    def writes_cache(self) -> bool:
        return self.role is Role.FULL

    @property
    def chooses(self) -> bool:
        return self.role in (Role.FULL, Role.REINDEX)


@dataclass(frozen=True)
class LayerPlan:
    """The plan of a whole model. Built by `LayerPlan.from_config`."""

    config: Csa2Config
    layers: tuple[LayerSpec, ...]

    @classmethod
    def from_config(cls, config: Csa2Config) -> LayerPlan:
        return cls(config=config, layers=tuple(_layer(config, i) for i in range(config.num_hidden_layers)))

    def __getitem__(self, layer_id: int) -> LayerSpec:
        return self.layers[layer_id]

    @property
    def kv_sources(self) -> tuple[LayerSpec, ...]:
        """The Full layers, which own the compressed caches, in layer order."""
        return tuple(layer for layer in self.layers if layer.writes_cache)

    @property
    def present_ratios(self) -> tuple[int, ...]:
        """The compress ratios above 0 that the model has, ascending."""
        return tuple(sorted({layer.ratio for layer in self.layers if layer.ratio}))

    def source_layer_of(self, layer_id: int) -> int:
        """The layer whose cache `layer_id` reads.

        Raises:
            KeyError: the layer has no global branch.
        """
        source = self.layers[layer_id].kv_source
        if source is None:
            raise KeyError(f"layer {layer_id} attends to its window only and reads no compressed cache")
        return source


def _layer(config: Csa2Config, layer_id: int) -> LayerSpec:
    ratio = config.compress_ratios[layer_id]
    chooses = layer_id in config.index_source_layer_ids
    candidate_source = config.candidate_source_layer_id
    consumes = chooses and candidate_source is not None and layer_id > candidate_source
    return LayerSpec(
        layer_id=layer_id,
        role=_role(config, layer_id),
        ratio=ratio,
        kv_source=_nearest(config.kv_source_layer_ids, layer_id) if ratio else None,
        index_source=_nearest(config.index_source_layer_ids, layer_id) if ratio else None,
        is_candidate_source=layer_id == candidate_source,
        pool_source=candidate_source if consumes else None,
    )


def _role(config: Csa2Config, layer_id: int) -> Role:
    if config.compress_ratios[layer_id] == 0:
        return Role.SWA_ONLY
    if layer_id in config.kv_source_layer_ids:
        return Role.FULL
    if layer_id in config.index_source_layer_ids:
        return Role.REINDEX
    return Role.REUSE


def _nearest(sources: tuple[int, ...], layer_id: int) -> int:
    """The last source at or before a layer (spec 1c); `Csa2Config` has checked that there is one."""
    return max(source for source in sources if source <= layer_id)
