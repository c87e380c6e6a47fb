"""Levelling: ranks that step together get packs of like cost.

    decided packs, a window at a time      3 9 1 4 8 2 7 5
    sorted by cost                         1 2 3 4 5 7 8 9
    cut into groups that step together     1 2 3 4 | 5 7 8 9
    groups shuffled, and inside them too   7 5 9 8 | 2 4 1 3

Pack k goes to rank k mod world whatever the world is, so groups of 64 neighbours are level, and
in them groups of 8: a pure function of the plan, without communication, the same for any number
of ranks. Groups stand at multiples of their size in the run's sequence of packs; where the first
or last one of a run is not whole, it takes neighbours from anywhere in the sorted window.
"""

from __future__ import annotations

import numpy as np

from ..ordering.permutation import key, shuffled
from .cost import Cost
from .plan import Plan

GROUPS = (64, 8)


class Leveler:
    """Reorders packs inside windows of `window` packs so that neighbours cost about the same.

    first: the place of the first pack in the run's sequence, so that groups stay aligned.

    >>> lengths = np.array([3, 9, 1, 4, 8, 2, 7, 5])
    >>> plan = Plan(np.arange(8), np.zeros(8, int), lengths, np.arange(9))
    >>> level(plan, window=64).lengths.tolist()
    [1, 2, 3, 4, 5, 7, 8, 9]
    """

    def __init__(
        self, cost: Cost | None = None, *, window: int = 1024, seed: int = 0, first: int = 0
    ):
        if window < 1 or window % GROUPS[0]:
            raise ValueError(f"window {window} must be a multiple of {GROUPS[0]} packs")
        self.cost = cost or Cost()
        self.window, self.seed = window, seed
        self._next = first
        self._held = Plan.join([])

    def feed(self, plan: Plan) -> Plan:
        """Take the next packs; give those of the windows that are complete now."""
        self._held = Plan.join([self._held, plan])
        out = []
        while len(self._held) >= (room := self.window - self._next % self.window):
            out.append(self._level(room))
        return Plan.join(out)

    def finish(self) -> Plan:
        """Give the packs that still wait for their window to fill."""
        return self._level(len(self._held))

    def _level(self, count: int) -> Plan:
        packs = np.arange(len(self._held))
        now, self._held = self._held.take(packs[:count]), self._held.take(packs[count:])
        window, begin = divmod(self._next, self.window)
        order = np.argsort(self.cost.of_packs(now), kind="stable")
        self._next += count
        return now.take(_grouped(order, begin, key("level", self.seed, window)))


def level(plan: Plan, cost: Cost | None = None, *, window: int = 1024, seed: int = 0) -> Plan:
    """Level a whole plan; see `Leveler`."""
    leveller = Leveler(cost, window=window, seed=seed)
    return Plan.join([leveller.feed(plan), leveller.finish()])


def _grouped(order: np.ndarray, begin: int, shuffle_key: np.uint64) -> np.ndarray:
    """Cut packs, sorted by cost, into groups of 64 of 8, and shuffle these, and inside them."""
    large, small = GROUPS
    head = min(-begin % large, len(order))
    tail = (len(order) - head) % large
    cut = int(shuffle_key) % (len(order) - head - tail + 1)
    before, partial, behind = np.split(order, [cut, cut + head + tail])
    groups = np.concatenate([before, behind]).reshape(-1, large // small, small)
    noise = shuffled(np.arange(groups.size), groups.size, shuffle_key).reshape(groups.shape)
    groups = np.take_along_axis(groups, np.argsort(noise, axis=2), axis=2)
    middle = np.argsort(noise[:, :, :1], axis=1)
    groups = np.take_along_axis(groups, middle, axis=1)[np.argsort(noise[:, 0, 0])]
    return np.concatenate([partial[:head], groups.ravel(), partial[head:]])
