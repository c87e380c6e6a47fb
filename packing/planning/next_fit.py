"""Order-preserving strategies: next fit (`sequential`) and concatenate-and-cut (`concat`).

budget 6, lengths 4 3 5 2       sequential   [4 .. ] [3 ...] [5 .] [2 ....]   next-fit
                                concat       [4 | 2→] [→1 | 5] [2 ....]       cut at the budget
"""

from __future__ import annotations

import numpy as np

from ..numba_jit import jit


@jit
def next_fit(sizes, budget, final):
    """Close a pack when the next segment does not fit.

    Returns the offsets of the closed packs; the segments after the last offset stay open.
    """
    offsets = np.zeros(len(sizes) + 1, np.int64)
    packs = 0
    used = 0
    for s in range(len(sizes)):
        if used + sizes[s] > budget:
            packs += 1
            offsets[packs] = s
            used = 0
        used += sizes[s]
        if used == budget:
            packs += 1
            offsets[packs] = s + 1
            used = 0
    if final and used > 0:
        packs += 1
        offsets[packs] = len(sizes)
    return offsets[: packs + 1]


@jit
def cut_stream(items, starts, lengths, budget, multiple):
    """Cut the stream of segments wherever a pack is full; return the smaller segments."""
    sizes = -(-lengths // multiple) * multiple
    max_segments = len(items) + sizes.sum() // budget + 1
    out = np.empty((3, max_segments), np.int64)
    n = 0
    used = 0
    for s in range(len(items)):
        start = starts[s]
        end = starts[s] + lengths[s]
        while start < end:
            length = min(budget - used, end - start)
            out[0, n] = items[s]
            out[1, n] = start
            out[2, n] = length
            n += 1
            start += length
            used = (used + -(-length // multiple) * multiple) % budget
    return out[:, :n]
