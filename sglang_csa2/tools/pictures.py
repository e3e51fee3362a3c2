"""Images of a recording; matplotlib is an optional extra (`pip install .[plots]`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_csa2.layer_plan import LayerPlan
from sglang_csa2.tools.recorded import Choices, Recording, share

# Cells of an image per side: longer contexts share cells.
_CELLS = 900
_LATER, _VISIBLE, _POOL, _CHOSEN = range(4)
_COLOURS = ["#ffffff", "#eef1f5", "#cbb8db", "#1f4e8c"]


class MissingPlots(RuntimeError):
    """matplotlib is not installed."""


def draw(recording: Recording, plan: LayerPlan, path: Path) -> None:
    """Write one image: a panel per index layer, and how the choices of pool consumers relate to others."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingPlots(
            "matplotlib is not installed and pictures need it: pip install 'sglang-csa2[plots]', or leave --out out"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    layers = list(recording.layers.values())
    consumers = [choices for choices in layers if _source(recording, choices) is not None]
    panels = len(layers) + bool(consumers)
    columns = min(panels, 3)
    lines = -(-panels // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(5.2 * columns, 4.6 * lines), squeeze=False)
    places = list(axes.flat)
    for place, choices in zip(places, layers, strict=False):
        _panel(place, recording, choices, _source(recording, choices), plan)
    if consumers:
        _agreement(places[len(layers)], recording, consumers, plan)
    for place in places[panels:]:
        place.axis("off")
    _legend(figure)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _source(recording: Recording, choices: Choices) -> Choices | None:
    """The choices of the layer in whose pool these were made, if it was recorded."""
    source = choices.layer.pool_source
    return None if source is None else recording.layers.get(source)


def _panel(axis: Any, recording: Recording, choices: Choices, source: Choices | None, plan: LayerPlan) -> None:
    from matplotlib.colors import ListedColormap

    spec = choices.layer
    cells = _cells(recording, choices, source, plan)
    first, last = int(recording.rows[0]), recording.context
    extent = (0, last, last, first)
    axis.imshow(cells, cmap=ListedColormap(_COLOURS), vmin=0, vmax=3, aspect="auto", extent=extent, resample=False)
    pool = f", in the pool of layer {spec.pool_source}" if spec.uses_candidates else ""
    source_note = ", candidate source" if spec.is_candidate_source else ""
    axis.set_title(f"layer {spec.layer_id}: {spec.role.value}, ratio {spec.ratio}{pool}{source_note}", fontsize=10)
    axis.set_xlabel("position in the context")
    axis.set_ylabel("position of the row")


def _cells(recording: Recording, choices: Choices, source: Choices | None, plan: LayerPlan) -> Any:
    """uint8 [rows, context] as an image: what a row cannot see, sees, has in its pool, chose; the most wins."""
    ratio, context = choices.layer.ratio, recording.context
    rows = len(recording.rows)
    down, across = max(1, -(-rows // _CELLS)), max(1, -(-context // _CELLS))
    image = torch.zeros(-(-rows // down), -(-context // across), dtype=torch.uint8)
    size = plan.config.candidate_block_size
    # The source's own panel shows the pool that it publishes.
    pool = source.blocks if source is not None else choices.blocks
    for row, position in enumerate(recording.rows.tolist()):
        line = image[row // down]
        line[: position // across + 1].clamp_(min=_VISIBLE)
        visible = (position + 1) // ratio
        if pool is not None and (pool[row] >= 0).any():
            entries = (pool[row][pool[row] >= 0, None] * size + torch.arange(size)).flatten()
            _mark(line, entries[entries < visible], ratio, across, _POOL)
        _mark(line, choices.positions[row][choices.positions[row] >= 0], ratio, across, _CHOSEN)
    return image.numpy()


def _mark(line: Tensor, entries: Tensor, ratio: int, across: int, value: int) -> None:
    """Raise the cells of compressed entries, each of which stands for `ratio` tokens."""
    for offset in range(ratio):
        cells = ((entries * ratio + offset) // across).long()
        line[cells] = line[cells].clamp(min=value)


def _agreement(axis: Any, recording: Recording, consumers: list[Choices], plan: LayerPlan) -> None:
    """Per row: how much of its free choice a consumer kept inside the pool, and how much its source chose too."""
    for index, choices in enumerate(consumers):
        source = _source(recording, choices)
        assert source is not None
        contested = ((recording.rows + 1) // choices.layer.ratio > plan.config.index_topk).nonzero().flatten()
        if not len(contested):
            continue
        colour = f"C{index}"
        at = recording.rows[contested].numpy()
        common = [share(choices.positions[row], source.positions[row]) for row in contested]
        axis.plot(
            at, _smooth(common), ":", lw=1.4, color=colour, label=f"layer {choices.layer.layer_id}: as its source chose"
        )
        if choices.unrestricted is not None:
            kept = [share(choices.unrestricted[row], choices.positions[row]) for row in contested]
            axis.plot(
                at, _smooth(kept), "-", lw=1.4, color=colour, label=f"layer {choices.layer.layer_id}: kept by the pool"
            )
    axis.set_ylim(0, 1.03)
    axis.set_title("choices inside the pool (means of 16 rows)", fontsize=10)
    axis.set_xlabel("position of the row")
    axis.set_ylabel("share of the choice")
    axis.legend(fontsize=7, loc="upper right")


def _smooth(values: list[float], rows: int = 16) -> list[float]:
    return [sum(values[max(0, end - rows) : end]) / min(rows, end) for end in range(1, len(values) + 1)]


def _legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    names = {"not visible": _LATER, "visible": _VISIBLE, "in the pool": _POOL, "chosen": _CHOSEN}
    patches = [Patch(facecolor=_COLOURS[value], edgecolor="#999", label=name) for name, value in names.items()]
    figure.legend(handles=patches, loc="lower center", ncol=4, fontsize=9, frameon=False)
