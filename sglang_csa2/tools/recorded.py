"""Reading a trace: the forwards of one request put together, and what its choices have in common."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sglang_csa2.layer_plan import LayerPlan, LayerSpec


class TraceError(ValueError):
    """A folder that holds no usable trace."""


@dataclass(frozen=True)
class Choices:
    """One index layer's choices for a run of rows; see `sglang_csa2.trace` for the fields."""

    layer: LayerSpec
    positions: Tensor
    blocks: Tensor | None
    unrestricted: Tensor | None


@dataclass(frozen=True)
class Recording:
    """One request: its rows' positions, ascending, and each index layer's choices."""

    rows: Tensor
    layers: dict[int, Choices]

    @property
    def context(self) -> int:
        return int(self.rows[-1]) + 1


def read(folder: Path, plan: LayerPlan) -> Recording:
    """The last request of a folder, from its latest row back to its first.

    Raises:
        TraceError: nothing was recorded.
    """
    files = sorted(folder.glob("forward-*.pt"), key=lambda path: path.stat().st_mtime_ns)
    # Every rank writes; one process's files are enough, since ranks choose alike.
    kept = [path for path in files if path.name.split("-")[1] == files[-1].name.split("-")[1]]
    forwards = [torch.load(path, weights_only=True) for path in kept]
    if not forwards:
        raise TraceError(
            f"{str(folder)!r} holds no forward-*.pt: start the server with SGLANG_CSA2_TRACE={folder} and send a prompt"
        )
    request, end = int(forwards[-1]["requests"][forwards[-1]["rows"] >= 0][-1]), None
    parts: list[tuple[dict, Tensor]] = []
    for forward in reversed(forwards):
        # A padding row of a fixed-shape decode has a position of -1.
        mine = ((forward["requests"] == request) & (forward["rows"] >= 0)).nonzero().flatten()
        if not len(mine) or (end is not None and int(forward["rows"][mine[-1]]) != end - 1):
            break
        end = int(forward["rows"][mine[0]])
        parts.insert(0, (forward, mine))
    rows = torch.cat([forward["rows"][mine] for forward, mine in parts])
    ids = [layer.layer_id for layer in plan.layers if layer.chooses and layer.layer_id in parts[-1][0]["layers"]]
    return Recording(
        rows, {i: _join(plan[i], [(f["layers"][i], m) for f, m in parts if i in f["layers"]]) for i in ids}
    )


def _join(layer: LayerSpec, parts: list[tuple[dict, Tensor]]) -> Choices:
    def joined(name: str) -> Tensor | None:
        # A forward without a pool, its context being short, has none of these; the rows after it may.
        width = max((len(part[name][0]) for part, _ in parts if part[name] is not None), default=0)
        if not width:
            return None
        missing = torch.full((1, width), -1, dtype=torch.int32)
        return torch.cat([missing.expand(len(m), -1) if part[name] is None else part[name][m] for part, m in parts])

    positions = joined("positions")
    assert positions is not None
    return Choices(layer, positions, joined("blocks"), joined("unrestricted"))


@dataclass(frozen=True)
class Overlap:
    """How a layer's choices relate to others', as means over the rows where there was something to choose.

    rows: how many those are. with_source: share of its choice that its pool's source chose too, None for a layer
    without a pool. recall: share of what it would have chosen without the pool that it did choose.
    """

    layer_id: int
    rows: int
    with_source: float | None
    recall: float | None


def overlaps(recording: Recording, plan: LayerPlan) -> list[Overlap]:
    """One row per index layer."""
    found = []
    for layer_id, choices in recording.layers.items():
        spec = choices.layer
        # Where no more is visible than may be chosen, every layer chooses all of it.
        contested = (recording.rows + 1) // spec.ratio > plan.config.index_topk
        source = recording.layers.get(spec.pool_source) if spec.pool_source is not None else None
        with_source = None if source is None else _shared(choices.positions, source.positions, contested)
        recall = None
        if choices.unrestricted is not None:
            listed = contested & (choices.unrestricted >= 0).any(1)
            recall = _shared(choices.unrestricted, choices.positions, listed)
        found.append(Overlap(layer_id, int(contested.sum()), with_source, recall))
    return found


def _shared(mine: Tensor, theirs: Tensor, rows: Tensor) -> float | None:
    """Mean share of `mine` that is in `theirs`, over `rows`."""
    shares = [share(mine[row], theirs[row]) for row in rows.nonzero().flatten()]
    return sum(shares) / len(shares) if shares else None


def share(mine: Tensor, theirs: Tensor) -> float:
    """Share of the entries of `mine` [k] that are in `theirs` [k]; -1 is no entry."""
    mine = mine[mine >= 0]
    return torch.isin(mine, theirs[theirs >= 0]).float().mean().item() if len(mine) else 1.0
