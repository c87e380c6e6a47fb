"""A plot of a run as SVG: the loss, the fill of its packs, and the metric of its evaluations.

loss     150 points high     one panel each, over the optimizer steps;
fill      90 points          light or dark, as the viewer prefers
metric    90 points
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LEFT, RIGHT, TOP, GAP = 720, 64, 24, 58, 44
MAX_POINTS = 600
"""Points drawn of a line: more would not be seen."""

Point = tuple[float, float]

STYLE = """
svg { font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; background: #fff; }
text { fill: #57606a; } .title { fill: #1f2328; font-size: 15px; font-weight: 600; }
.name { fill: #1f2328; font-weight: 600; } .grid { stroke: #d8dee4; stroke-width: 1; }
.raw { stroke: #9ec5f0; } .line { stroke: #0969da; } .dot { fill: #0969da; stroke: #fff; }
.level { stroke: #bc4c00; stroke-dasharray: 5 4; } .label { fill: #bc4c00; }
path, .level { fill: none; stroke-width: 2; stroke-linejoin: round; } .raw { stroke-width: 1; }
@media (prefers-color-scheme: dark) {
  svg { background: #0d1117; } text { fill: #9198a1; } .title, .name { fill: #f0f6fc; }
  .grid { stroke: #30363d; } .raw { stroke: #1f4b7d; } .line { stroke: #4493f8; }
  .dot { fill: #4493f8; stroke: #0d1117; } .level { stroke: #f0883e; } .label { fill: #f0883e; }
}
"""


@dataclass(frozen=True, slots=True)
class Panel:
    """One quantity over the steps."""

    name: str
    points: Sequence[Point]
    height: int = 90
    percent: bool = False
    """The axis goes from 0 to 100%."""
    dots: bool = False
    """Draw every point, as of a few evaluations, instead of a smoothed line."""
    level: tuple[float, str] | None = None
    """A value to compare with, and what it is."""


def draw(title: str, panels: Sequence[Panel]) -> str:
    """Return the plot as a self-contained SVG document."""
    last = max((x for panel in panels for x, _ in panel.points), default=1)
    parts, top = [], TOP
    for panel in panels:
        parts.append(_panel(panel, top, last))
        top += panel.height + GAP
    axis = top - GAP + 16
    for step in _ticks(0, last):
        anchor = "end" if step == last else "middle"
        parts.append(_text(_x(step, last), axis, f"{step:,.0f}", anchor))
    parts.append(_text(WIDTH - RIGHT, axis + 18, "optimizer steps", "end"))
    size = f'width="{WIDTH}" height="{axis + 28}" viewBox="0 0 {WIDTH} {axis + 28}"'
    body = "\n".join([_text(LEFT, 24, title, style="title"), *parts])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}</style>\n{body}\n</svg>\n'
    )


def _panel(panel: Panel, top: int, last: float) -> str:
    values = [y for _, y in panel.points if math.isfinite(y)] or [0.0]
    low, high = (0.0, 1.0) if panel.percent else (min(values), max(values))
    ticks = [0.0, 0.5, 1.0] if panel.percent else _ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])

    def y(value: float) -> float:
        return top + panel.height * (1 - (value - low) / ((high - low) or 1))

    parts = [_text(LEFT, top - 10, panel.name, style="name")]
    for tick in ticks:
        label = f"{tick:.0%}" if panel.percent else f"{tick:g}"
        parts.append(f'<path class="grid" d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(_text(LEFT - 8, y(tick) + 4, label, "end"))
    if panel.level is not None:
        value, label = panel.level
        parts.append(f'<path class="level" d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(_text(WIDTH - RIGHT, y(value) - 6, label, "end", "label"))
    places = [(_x(step, last), y(value)) for step, value in panel.points if math.isfinite(value)]
    if panel.dots:
        parts.append(f'<path class="line" d="{_path(places)}"/>')
        parts += [f'<circle class="dot" cx="{a:.1f}" cy="{b:.1f}" r="4"/>' for a, b in places]
    else:
        parts.append(f'<path class="raw" d="{_path(_thinned(places))}"/>')
        parts.append(f'<path class="line" d="{_path(_thinned(_smoothed(places)))}"/>')
    return "\n".join(parts)


def _x(step: float, last: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * step / (last or 1)


def _text(x: float, y: float, text: str, anchor: str = "start", style: str = "tick") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{style}" {place}>{escape(text)}</text>'


def _path(places: Sequence[Point]) -> str:
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in places) if places else ""


def _thinned(places: Sequence[Point]) -> Sequence[Point]:
    return places[:: max(1, len(places) // MAX_POINTS)]


def _smoothed(places: Sequence[Point], share: float = 0.02) -> list[Point]:
    """Replace every value by an exponential mean over about this share of the points."""
    keep, result = 1 - 1 / max(1.0, share * len(places)), []
    for a, b in places:
        result.append((a, keep * result[-1][1] + (1 - keep) * b if result else b))
    return result


def _ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return round numbers from low to high.

    >>> _ticks(0, 200), _ticks(3.4, 7.6)
    ([0, 50, 100, 150, 200], [4, 6])
    """
    raw = (high - low) / count or 1.0
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * scale for unit in (1, 2, 2.5, 5, 10) if unit * scale >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    ticks = [round(number * step, 10) for number in range(first, last + 1)]
    return [int(tick) if tick == int(tick) else tick for tick in ticks] or [low]
