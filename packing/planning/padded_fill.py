"""Estimate the fill that padded batches of given lengths would have, for comparison with packs.

lengths 4 1 2 1, budget 8     packed   aaaabccd             fill 8 / 8
                              padded   aaaab... ccd.....    fill 8 / 16
"""

from __future__ import annotations

import numpy as np

from .overflow import Overflow, cut_items
from .planner import Counts

MAX_SAMPLES = 20_000
"""Samples to draw at random from a larger set."""


def padded_fill(
    lengths: np.ndarray,
    budget: int,
    overflow: Overflow = "split",
    max_length: int | None = None,
    seed: int = 0,
) -> float:
    """Return the fraction of positions that hold tokens in padded batches of `budget` positions.

    Samples come in random order; a batch takes as many as fit when each is padded to the longest of
    them. Samples longer than the budget or than `max_length` are split, truncated or dropped, as
    they are in packs.

    >>> padded_fill(np.array([4, 4, 4, 4]), budget=8)
    1.0
    >>> padded_fill(np.array([7, 1]), budget=8)
    0.5
    >>> padded_fill(np.array([7, 1]), budget=8, overflow="truncate", max_length=3)
    0.5
    """
    lengths = np.asarray(lengths, np.int64)
    draw = np.random.default_rng(seed)
    drawn = draw.choice(lengths, min(MAX_SAMPLES, len(lengths)), replace=False)
    capacity = min(budget, max_length or budget)
    if (drawn > capacity).any():
        drawn = cut_items(drawn, capacity, overflow, Counts())[2]
    tokens = positions = count = longest = 0
    for length in drawn.tolist():
        full, rest = divmod(length, budget)
        tokens += length
        positions += full * budget
        if not rest:
            continue
        if (count + 1) * max(longest, rest) > budget:
            positions += budget
            count = longest = 0
        count, longest = count + 1, max(longest, rest)
    positions += budget * (count > 0)
    return tokens / positions if positions else 1.0
