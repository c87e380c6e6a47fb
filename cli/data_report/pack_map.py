"""A pack map: one line per pack, one block per sample, in the terminal.

    0 ████████████▓▓▓▓▓▓▒▒▒▒▒▒▒▒▒░░░ 100.0 %   4 samples

Samples differ in shade, and in color where a terminal has color.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from rich.text import Text

COLORS = (39, 208, 76, 170, 220, 45, 203, 112, 141, 180)
"""Terminal colors (of 256); neighbors are easy to distinguish."""
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
