"""What the engine was busy with over time, drawn as SVG: requests above, pages of the cache below.

    slots   ┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄
    running ▄▄████████████████▅▃▁     waiting: a line, with an axis of its own on the right

    pages   ▁▃▄▅▅▆▆▆▆▅▅▆▆▅▄▄▃▂▁▁▁
            0        1        2  seconds

What a step runs holds until the next one begins, so all lines are stairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from math import floor, log10

import numpy as np

WIDTH, HEIGHT, LEFT, RIGHT = 820, 448, 56, 760
INK, BLUE, FILL, BROWN = "#333333", "#3f77ad", "#abcbe6", "#a63603"
"""Light, middle and dark: told apart in grey, too."""
GRID = 'stroke="black" stroke-opacity="0.12"'
NOTHING = np.array([[0.0, 0, 0, 0, 0, 1, 1]])


@dataclass(frozen=True, slots=True)
class Panel:
    """A frame from 0 to `most`."""

    top: float
    bottom: float
    most: float

    def y(self, value: float) -> float:
        return self.bottom - value * (self.bottom - self.top) / self.most


def occupancy_svg(log: np.ndarray, idle: np.ndarray, title: str) -> str:
    """Draw the steps of a `Stats.steps_log`.

    idle: times from which on nothing was left to do, until the next step.
    """
    log = _with_pauses(log, idle) if len(log) else NOTHING
    times = log[:, 0] - log[0, 0]
    span = float(times[-1]) + _usual(times)
    x = LEFT + np.append(times, span) * ((RIGHT - LEFT) / span)
    running, waiting, used, slots, pages = log[:, [1, 2, 4, 5, 6]].T
    use = 100 * used / pages
    requests = Panel(68, 248, 1.12 * max(float(slots.max()), 1))
    queue = Panel(68, 248, 1.3 * max(float(waiting.max()), 1))
    cache = Panel(292, 402, 100)
    parts = [
        _area(x, running, requests),
        _area(x, use, cache),
        *_time_axis(span, requests, cache),
        *_value_axis(requests, ticks(requests.most, 6, least=1)),
        *_value_axis(cache, [0, 25, 50, 75, 100]),
        *_right_axis(queue, ticks(queue.most, 6, least=1)),
        _line(x, slots, requests, f'stroke="{INK}" stroke-dasharray="5 3"'),
        _line(x, waiting, queue, f'stroke="{BROWN}"'),
        _legend(requests, "requests", (BLUE, "■", "running"),
                (INK, "- -", f"slots ({_number(slots.max())})"),
                (BROWN, "—", "waiting, by the axis on the right")),
        _legend(cache, "pages", (BLUE, "■", f"in use, % of {_number(pages[-1])}")),
        _text(LEFT, 28, title, 'font-size="16" font-weight="bold"'),
    ]  # fmt: skip
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="12" fill="{INK}">'
        f"<title>{escape(title)}</title>"
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>{"".join(parts)}</svg>\n'
    )


def ticks(most: float, count: int, least: float = 0) -> list[float]:
    """Round numbers from 0 to `most`, at most `count` steps of 1, 2 or 5 times a power of ten.

    >>> ticks(17, 4), ticks(1.1, 4, least=1)
    ([0.0, 5.0, 10.0, 15.0], [0, 1])
    """
    power = 10.0 ** floor(log10(most / count))
    step = max(next(k * power for k in (1, 2, 5, 10) if k * power * count >= most), least)
    return [round(i * step, 12) for i in range(int(most / step) + 1)]


def thinned(x: np.ndarray, y: np.ndarray, bins: int = 330) -> np.ndarray:
    """Which points to keep, at most three a bin of x: the least, the largest and the last.

    >>> thinned(np.arange(6), np.array([1, 5, 2, 0, 3, 3]), bins=1).tolist()
    [1, 3, 5]
    """
    if len(x) <= 3 * bins:
        return np.arange(len(x))
    edges = np.searchsorted(x, np.linspace(x[0], x[-1], bins + 1)[1:-1])
    kept: set[int] = set()
    for places in np.split(np.arange(len(x)), edges):
        if len(places):
            within = y[places]
            kept |= {int(places[i]) for i in (within.argmin(), within.argmax(), -1)}
    return np.array(sorted(kept))


def _with_pauses(log: np.ndarray, idle: np.ndarray) -> np.ndarray:
    """The steps, and rows of nothing where there was nothing to do."""
    after = np.searchsorted(log[:, 0], idle, side="right")
    idle, after = idle[after > 0], after[after > 0]
    pauses = log[after - 1] * [0, 0, 0, 0, 0, 1, 1]
    pauses[:, 0] = idle
    return np.insert(log, after, pauses, axis=0)


def _usual(times: np.ndarray) -> float:
    """How long a step takes: the last one is drawn so long, since nothing tells when it ended."""
    return float(np.median(np.diff(times))) or 1e-3 if len(times) > 1 else 1e-3


def _stairs(x: np.ndarray, y: np.ndarray, panel: Panel) -> str:
    """The path along all steps; x has one more: where the last one ends."""
    kept = thinned(x[:-1], y)
    first, *heights = map(panel.y, y[kept].tolist())
    moves = (f"H{a:.1f}V{b:.1f}" for a, b in zip(x[kept[1:]].tolist(), heights, strict=True))
    return f"M{x[0]:.1f} {first:.1f}{''.join(moves)}H{x[-1]:.1f}"


def _line(x: np.ndarray, y: np.ndarray, panel: Panel, style: str) -> str:
    return f'<path d="{_stairs(x, y, panel)}" fill="none" stroke-width="1.4" {style}/>'


def _area(x: np.ndarray, y: np.ndarray, panel: Panel) -> str:
    path = f"{_stairs(x, y, panel)}V{panel.bottom}H{x[0]:.1f}Z"
    return f'<path d="{path}" fill="{FILL}" stroke="{BLUE}" stroke-width="0.8"/>'


def _time_axis(span: float, *panels: Panel) -> list[str]:
    """Frames, lines through all of them, and seconds below the last."""
    parts, below = [], panels[-1].bottom + 16
    for panel in panels:
        size = f'width="{RIGHT - LEFT}" height="{panel.bottom - panel.top}"'
        parts.append(f'<rect x="{LEFT}" y="{panel.top}" {size} fill="none" stroke="{INK}"/>')
    for value in ticks(span, 12):
        x = LEFT + value / span * (RIGHT - LEFT)
        parts += (f'<path d="M{x:.1f} {panel.top}V{panel.bottom}" {GRID}/>' for panel in panels)
        parts.append(_text(x, below, _number(value), 'text-anchor="middle"'))
    return [*parts, _text((LEFT + RIGHT) / 2, below + 18, "seconds", 'text-anchor="middle"')]


def _value_axis(panel: Panel, values: list[float]) -> list[str]:
    parts = [f'<path d="M{LEFT} {panel.y(value):.1f}H{RIGHT}" {GRID}/>' for value in values]
    right = 'text-anchor="end"'
    return parts + [_text(LEFT - 6, panel.y(v) + 4, _number(v), right) for v in values]


def _right_axis(panel: Panel, values: list[float]) -> list[str]:
    return [_text(RIGHT + 6, panel.y(v) + 4, _number(v), f'fill="{BROWN}"') for v in values]


def _legend(panel: Panel, name: str, *entries: tuple[str, str, str]) -> str:
    marks = (
        f'<tspan dx="14" fill="{colour}" font-weight="bold">{mark}</tspan> {what}'
        for colour, mark, what in entries
    )
    words = f'<tspan font-weight="bold">{name}</tspan>{"".join(marks)}'
    return f'<text x="{LEFT}" y="{panel.top - 9}">{words}</text>'


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def _number(value: float) -> str:
    return f"{value:,.10g}"
