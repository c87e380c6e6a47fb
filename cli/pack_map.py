"""A pack map: one line per pack, one block per sample, in the terminal, as HTML or as PNG.

    0 ████████████▓▓▓▓▓▓▒▒▒▒▒▒▒▒▒░░░ 100.0 %   4 samples

Samples differ in color in a terminal, and in shade elsewhere.
"""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np

COLORS = (39, 208, 76, 170, 220, 45, 203, 112, 141, 180)
"""Terminal colors (of 256); neighbors are easy to distinguish."""
HTML_COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#edc948", "#76b7b2", "#e15759")
SHADES = "█▓▒░"


def has_color(stream: IO[str]) -> bool:
    """Whether a stream is a terminal whose user did not switch colors off (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def draw_pack(lengths: Sequence[int] | np.ndarray, budget: int, width: int, color: bool) -> str:
    """Draw one pack; unused budget is blank.

    >>> draw_pack([4, 2], budget=8, width=8, color=False)
    '████▓▓  '
    """
    edges = np.round(np.cumsum([0, *lengths]) * width / budget).astype(int)
    blocks = []
    for index, cells in enumerate(np.diff(edges).tolist()):
        if color:
            blocks.append(f"\x1b[48;5;{COLORS[index % len(COLORS)]}m{' ' * cells}\x1b[0m")
        else:
            blocks.append(SHADES[index % len(SHADES)] * cells)
    return "".join(blocks) + " " * (width - int(edges[-1]))


def draw_packs(packs: Sequence[np.ndarray], budget: int, width: int, color: bool) -> str:
    """Draw packs, each given as the lengths of its samples."""
    rows = []
    for index, lengths in enumerate(packs):
        fill = f"{np.sum(lengths) / budget:6.1%}"
        blocks = draw_pack(lengths, budget, width, color)
        rows.append(f"{index:5} {blocks} {fill} {len(lengths):4} samples")
    return "\n".join(rows)


def write_html(path: Path, packs: Sequence[np.ndarray], budget: int) -> None:
    """Write the map as a self-contained HTML page."""
    rows = []
    for index, lengths in enumerate(packs):
        blocks = "".join(
            f'<i style="width:{100 * n / budget:.3f}%;background:'
            f'{HTML_COLORS[i % len(HTML_COLORS)]}" title="{int(n)} tokens"></i>'
            for i, n in enumerate(lengths)
        )
        label = html.escape(f"{np.sum(lengths) / budget:.1%}, {len(lengths)} samples")
        rows.append(f"<p><b>{index}</b><span>{blocks}</span><b>{label}</b></p>")
    style = (
        "body{font:12px sans-serif}p{display:flex;margin:2px;gap:8px}b{width:9em;font-weight:400}"
        "span{flex:1;display:flex;background:#eee}i{height:14px}"
    )
    title = f"<h1>{len(packs)} packs of {budget} tokens</h1>"
    page = f"<!doctype html><meta charset=utf-8><style>{style}</style>{title}{''.join(rows)}"
    path.write_text(page, encoding="utf-8")


def write_png(path: Path, packs: Sequence[np.ndarray], budget: int) -> None:
    """Write the map as a PNG image; needs matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 0.25 * len(packs) + 1.2), layout="constrained")
    axes = figure.subplots()
    for index, lengths in enumerate(packs):
        starts = np.cumsum([0, *lengths])[:-1]
        colors = [HTML_COLORS[i % len(HTML_COLORS)] for i in range(len(lengths))]
        axes.barh([index] * len(lengths), lengths, left=starts, color=colors)
        label = f" {np.sum(lengths) / budget:.1%}, {len(lengths)}"
        axes.text(budget, index, label, va="center", fontsize=8)
    axes.set(
        xlim=(0, budget), ylim=(len(packs) - 0.4, -0.6), xlabel="tokens", ylabel="pack",
        title=f"{len(packs)} packs of {budget:,} tokens: fill, samples",
    )  # fmt: skip
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, format="png")  # whatever the name: it would append a suffix
