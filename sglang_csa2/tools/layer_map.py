"""The layer map: who keeps a cache, who chooses in it and who reads what, as text and as SVG."""

from __future__ import annotations

from xml.sax.saxutils import escape

from sglang_csa2.layer_plan import LayerPlan, LayerSpec, Role

_COLOURS = {Role.SWA_ONLY: "#c9ced6", Role.FULL: "#2f6db5", Role.REINDEX: "#e08a2c", Role.REUSE: "#a9c8e8"}
_MEANING = {
    Role.FULL: "keeps a cache, chooses in it",
    Role.REINDEX: "chooses anew in its source's cache",
    Role.REUSE: "reads its source's cache and choice",
    Role.SWA_ONLY: "attends to its window only",
}


def as_text(plan: LayerPlan) -> str:
    """One line per layer, then the counts."""
    lines = [f"{'layer':>5}  {'role':8} {'ratio':>5} {'kv_source':>9} {'index_source':>12}  notes"]
    for layer in plan.layers:
        kv, index = (("-" if source is None else str(source)) for source in (layer.kv_source, layer.index_source))
        ratio = layer.ratio or "-"
        lines.append(f"{layer.layer_id:>5}  {layer.role.value:8} {ratio:>5} {kv:>9} {index:>12}  {_notes(plan, layer)}")
    counts = {role: sum(layer.role is role for layer in plan.layers) for role in Role}
    lines.append("")
    lines += [f"{count:>5}  {role.value:8} {_MEANING[role]}" for role, count in counts.items() if count]
    return "\n".join(line.rstrip() for line in lines)


def _notes(plan: LayerPlan, layer: LayerSpec) -> str:
    if layer.is_candidate_source:
        config = plan.config
        return f"publishes a pool of {config.candidate_topk_blocks} blocks of {config.candidate_block_size}"
    if layer.pool_source is not None:
        return f"chooses inside the pool of layer {layer.pool_source}"
    return ""


# A column per layer; caches above it, choices below it.
_STEP, _BOX, _LEFT, _TOP = 26, 20, 96, 108


def as_svg(plan: LayerPlan) -> str:
    """Layers as boxes in a row, each cache's span above them, each choice's span below, the pool at the bottom."""
    width = _LEFT + _STEP * len(plan.layers) + 24
    parts = [_text(_LEFT, 22, "CSA2 layer map", size=15, bold=True)]
    for index, (label, y) in enumerate((("cache read", 62), ("layer", _TOP + 14), ("choice read", 166), ("pool", 206))):
        parts.append(_text(8, y, label, colour="#333" if index == 1 else "#666"))
    for source in plan.kv_sources:
        reading = [layer.layer_id for layer in plan.layers if layer.kv_source == source.layer_id]
        parts += _span(reading, 48, f"of layer {source.layer_id}, ratio {source.ratio}", _COLOURS[Role.FULL])
    for layer in plan.layers:
        if layer.chooses:
            reading = [other.layer_id for other in plan.layers if other.index_source == layer.layer_id]
            parts += _span(reading, 152, f"of {layer.layer_id}", _COLOURS[layer.role])
        if layer.is_candidate_source:
            using = [other.layer_id for other in plan.layers if other.uses_candidates]
            parts += _span([layer.layer_id, *using], 192, f"of layer {layer.layer_id}", "#7a5195")
        parts += _box(layer)
    parts += _legend(240)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="290" viewBox="0 0 {width} 290" '
        'font-family="Helvetica, Arial, sans-serif">\n<rect width="100%" height="100%" fill="white"/>\n'
        f"{body}\n</svg>\n"
    )


def _x(layer_id: int) -> int:
    return _LEFT + _STEP * layer_id


def _box(layer: LayerSpec) -> list[str]:
    dark = layer.role in (Role.FULL, Role.REINDEX)
    middle = _x(layer.layer_id) + _BOX / 2
    return [
        f'<rect x="{_x(layer.layer_id)}" y="{_TOP}" width="{_BOX}" height="{_BOX}" rx="3" '
        f'fill="{_COLOURS[layer.role]}"><title>{escape(f"layer {layer.layer_id}: {layer.role.value}")}</title></rect>',
        _text(middle, _TOP + 14, str(layer.layer_id), size=10, colour="white" if dark else "#222", middle=True),
    ]


def _span(layers: list[int], y: int, label: str, colour: str) -> list[str]:
    """A bar over the layers from the first to the last; a tick on each of them, the label inside or beside."""
    left, right = _x(layers[0]), _x(layers[-1]) + _BOX
    bar = f'<rect x="{left}" y="{y}" width="{right - left}" height="18" rx="3" fill="{colour}" fill-opacity="0.22"/>'
    ticks = [f'<rect x="{_x(i) + _BOX / 2 - 1.5}" y="{y + 14}" width="3" height="4" fill="{colour}"/>' for i in layers]
    if right - left < 6.2 * len(label):
        label = label.split(",")[0]
    return [bar, *ticks, _text(left + 4, y + 12, label, size=10)]


def _legend(y: int) -> list[str]:
    parts = []
    for index, (role, meaning) in enumerate(_MEANING.items()):
        x, line = 8 + 300 * (index % 2), y + 22 * (index // 2)
        parts.append(f'<rect x="{x}" y="{line}" width="12" height="12" rx="2" fill="{_COLOURS[role]}"/>')
        parts.append(_text(x + 18, line + 10, f"{role.value}: {meaning}", size=11))
    return parts


def _text(
    x: float, y: float, text: str, *, size: int = 11, colour: str = "#222", bold: bool = False, middle: bool = False
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    anchor = ' text-anchor="middle"' if middle else ""
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}"{weight}{anchor}>{escape(text)}</text>'
