"""Reorder the packs of a mixture so that the sources' shares of tokens stay even.

    packs of a plan, tokens of source 0     9 8 1 9 0 2 1 8        5 in the mean
    reordered                               9 1 8 0 9 2 1 8

The packs of an interval of a mixture's schedule come in random order. By chance, one source may
have more of the first packs and less of the last. If a pack would move a source's tokens further
than a quarter of a pack from its share, it waits, and another pack comes first.
"""

from __future__ import annotations

import numpy as np

from ..numba_jit import jit
from .planner import Plan

LOOKAHEAD = 256
"""Number of packs from which the next is chosen."""


def order_by_shares(plan: Plan, sources: np.ndarray, num_sources: int, budget: int) -> Plan:
    """Reorder the packs of a plan whose segments come from these sources.

    >>> plan = Plan(*np.array([[0, 1, 2, 3], [0] * 4, [8] * 4]), np.arange(5))
    >>> order_by_shares(plan, np.array([0, 0, 1, 1]), num_sources=2, budget=8).items.tolist()
    [0, 2, 1, 3]
    """
    tokens = np.zeros((len(plan), num_sources))
    packs = np.repeat(np.arange(len(plan)), np.diff(plan.offsets))
    np.add.at(tokens, (packs, sources), plan.lengths)
    shares = tokens.sum(0) / max(1.0, tokens.sum())
    return plan.take(_even_order(tokens - tokens.sum(1)[:, None] * shares, budget / 4))


@jit
def _even_order(excess, limit):
    """Order rows so that their running sums stay within a limit, or as near to it as possible."""
    n, total = len(excess), np.zeros(excess.shape[1])
    order, waiting = np.empty(n, np.int64), np.arange(n)
    for i in range(n):
        best, lowest = i, np.inf
        for j in range(i, min(n, i + LOOKAHEAD)):
            largest = 0.0
            for s in range(len(total)):
                largest = max(largest, abs(total[s] + excess[waiting[j], s]))
            if largest < lowest:
                best, lowest = j, largest
            if lowest <= limit:
                break
        order[i] = chosen = waiting[best]
        for j in range(best, i, -1):  # the packs that were passed over stay first, in their order
            waiting[j] = waiting[j - 1]
        for s in range(len(total)):
            total[s] += excess[chosen, s]
    return order
