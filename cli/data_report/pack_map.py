"""A pack map: one line per pack, one block per sample, in the terminal or as PNG.

    0 ████████████▓▓▓▓▓▓▒▒▒▒▒▒▒▒▒░░░ 100.0 %   4 samples

Samples differ in shade, and in color where a terminal has color.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from rich.text import Text

COLORS = (39, 208, 76, 170, 220, 45, 203, 112, 141, 180)
"""Terminal colors (of 256); neighbors are easy to distinguish."""
IMAGE_COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#edc948", "#76b7b2", "#e15759")
SHADES = "█▓▒░"


def draw_pack(lengths: Sequence[int] | np.ndarray, budget: int, width: int) -> Text:
    """Draw one pack; unused budget is blank.

    >>> draw_pack([4, 2], budget=8, width=8).plain
    '████▓▓  '
    """
    from rich.text import Text

    edges = np.round(np.cumsum([0, *lengths]) * width / budget).astype(int)
    drawn = Text()
    for index, cells in enumerate(np.diff(edges).tolist()):
        shade, color = SHADES[index % len(SHADES)], COLORS[index % len(COLORS)]
        drawn.append(shade * cells, f"color({color})")
    return drawn.append(" " * (width - int(edges[-1])))


def draw_packs(packs: Sequence[np.ndarray], budget: int, width: int) -> Text:
    """Draw packs, each given as the lengths of its samples, one per line."""
    from rich.text import Text

    rows = []
    for index, lengths in enumerate(packs):
        fill = f"{np.sum(lengths) / budget:6.1%}"
        blocks = draw_pack(lengths, budget, width)
        rows.append(Text.assemble(f"{index:5} ", blocks, f" {fill} {len(lengths):4} samples"))
    return Text("\n").join(rows)


def write_png(path: Path, packs: Sequence[np.ndarray], budget: int) -> None:
    """Write the map as a PNG image; needs matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 0.25 * len(packs) + 1.2), layout="constrained")
    axes = figure.subplots()
    for index, lengths in enumerate(packs):
        starts = np.cumsum([0, *lengths])[:-1]
        colors = [IMAGE_COLORS[i % len(IMAGE_COLORS)] for i in range(len(lengths))]
        axes.barh([index] * len(lengths), lengths, left=starts, color=colors)
        label = f" {np.sum(lengths) / budget:.1%}, {len(lengths)}"
        axes.text(budget, index, label, va="center", fontsize=8)
    axes.set(
        xlim=(0, budget), ylim=(len(packs) - 0.4, -0.6), xlabel="tokens", ylabel="pack",
        title=f"{len(packs)} packs of {budget:,} tokens: fill, samples",
    )  # fmt: skip
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, format="png")  # explicit: otherwise it would append a suffix to some names
