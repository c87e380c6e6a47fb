"""Horizontal bars: pairs of ours and a peer, at one scale for each group."""

from __future__ import annotations

from dataclasses import dataclass

from svg import Canvas


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar."""

    name: str
    value: float
    label: str
    """The value in words, beside the bar."""
    ours: bool


def bar_chart(title: str, groups: list[tuple[str, list[Bar]]], note: str = "") -> str:
    """Draw groups of bars; the longest bar of each group has the full width."""
    left, width, row, gap = 292, 330, 22, 34
    rows = sum(len(bars) for _, bars in groups)
    height = 52 + rows * row + len(groups) * gap + (24 if note else 4)
    canvas = Canvas(820, height, title)
    canvas.text(24, 34, title, 16, weight=600)
    y = 52.0
    for name, bars in groups:
        y += gap - 14
        canvas.text(24, y, name, 13, weight=600)
        y += 10
        most = max(bar.value for bar in bars)
        for bar in bars:
            canvas.text(left - 12, y + 14, bar.name, 12, css="quiet", anchor="end")
            length = max(1.5, width * bar.value / most)
            canvas.rect(left, y + 2, length, row - 6, css="ours" if bar.ours else "peer", rx=3)
            canvas.text(left + length + 8, y + 14, bar.label, 12, weight=600 if bar.ours else 400)
            y += row
        y += 4
    if note:
        canvas.text(24, height - 14, note, 11, css="quiet")
    return canvas.svg()
