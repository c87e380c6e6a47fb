"""The tokens that an epoch of a mixture draws from each source, computed without its documents."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .mixture import StoppingStrategy, Weight, weight_schedule

STEPS = 256
"""Steps between two token counts of a schedule, each with constant weights."""


def estimate_epoch(
    tokens: Sequence[float] | np.ndarray,
    weights: Sequence[Weight],
    stopping_strategy: StoppingStrategy,
) -> np.ndarray:
    """Estimate the tokens that the first epoch draws from each source, given those it has.

    >>> estimate_epoch([300, 100], [1, 1], "first_exhausted").tolist()
    [100.0, 100.0]
    >>> estimate_epoch([300, 100], [1, 1], "all_exhausted").tolist()
    [300.0, 300.0]
    """
    knots, table = weight_schedule(weights)
    available, total = np.asarray(tokens, float), 0.0
    drawn, exhausted = np.zeros_like(available), np.zeros(len(available), bool)
    while True:
        share = np.array([np.interp(total, knots, each) for each in table.T])
        if stopping_strategy == "all_exhausted_without_replacement":
            share[exhausted] = 0
        knot = int(np.searchsorted(knots, total, "right"))
        retired = (table[knot - 1 :] == 0).all(0)
        any_ends = stopping_strategy == "first_exhausted" and exhausted.any()
        if any_ends or (exhausted | retired).all() or not share.any():
            return drawn
        share /= share.sum()
        next_knot = np.inf
        if knot < len(knots):
            step = max(1.0, (knots[knot] - knots[knot - 1]) / STEPS)
            next_knot = min(total + step, float(knots[knot]))
        waiting, ends = (share > 0) & ~exhausted, np.full(len(share), np.inf)
        ends[waiting] = total + (available[waiting] - drawn[waiting]) / share[waiting]
        end = min(next_knot, ends.min())
        drawn, total = drawn + share * (end - total), end
        exhausted |= ends <= end
