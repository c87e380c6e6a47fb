"""Load balancing: reorder packs so that ranks get packs of similar cost in the same step.

    planned packs, a block at a time       3 9 1 4 8 2 7 5
    sorted by cost                         1 2 3 4 5 7 8 9
    cut into groups that step together     1 2 3 4 | 5 7 8 9
    groups shuffled, also inside           7 5 9 8 | 2 4 1 3

The cost of a pack is linear in its tokens, plus attention, quadratic in the lengths:

    cost = linear · Σ length  +  quadratic · Σ length²

Packs of equal tokens differ in the second sum, and the ranks of a step wait for the slowest one.

Pack k goes to rank k mod world_size for any world size, so groups of 64 neighbours are leveled, and
inside them groups of 8. The result is a pure function of the plan: it needs no communication and is
the same for any number of ranks. Groups start at multiples of their size in the run's sequence of
packs; the first or last group of a block may be incomplete.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..ordering.permutation import permute, shuffle_key
from .planner import Plan

GROUPS = (64, 8)
"""Sizes of the groups, one inside the other: packs of a step on up to 8 or 64 ranks are similar."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost coefficients of a model; default: a 7B model (hidden size 4096) as verl counts it.

    >>> Cost().of(np.array([1000, 2000])).tolist()
    [25576000.0, 53152000.0]
    """

    linear: float = 24576.0
    quadratic: float = 1.0

    def __post_init__(self):
        if self.linear < 0 or self.quadratic < 0 or self.linear + self.quadratic == 0:
            raise ValueError(f"a cost must increase with the length, got {self}")

    def of(self, lengths: np.ndarray) -> np.ndarray:
        """Return the cost of each sequence."""
        lengths = lengths.astype(np.float64)
        return (self.linear + self.quadratic * lengths) * lengths

    def of_packs(self, plan: Plan) -> np.ndarray:
        """Return the cost of each pack."""
        return plan.sum_per_pack(self.of(plan.lengths))


class Leveler:
    """Reorders packs inside blocks of `block` packs so that neighbours cost about the same.

    first: index of the first pack in the run's sequence, so that groups stay aligned.

    >>> lengths = np.array([3, 9, 1, 4, 8, 2, 7, 5])
    >>> plan = Plan(np.arange(8), np.zeros(8, int), lengths, np.arange(9))
    >>> balance_plan(plan, block=64).lengths.tolist()
    [4, 7, 2, 5, 3, 1, 8, 9]
    """

    def __init__(
        self,
        cost: Cost | None = None,
        *,
        block: int = 1024,
        seed: int = 0,
        epoch: int = 0,
        first: int = 0,
    ):
        if block < 1 or block % GROUPS[0]:
            raise ValueError(f"block {block} must be a multiple of {GROUPS[0]} packs")
        self.cost = cost or Cost()
        self.block, self.seed, self.epoch = block, seed, epoch
        self._next = first
        self._pending = Plan.join([])

    def feed(self, plan: Plan) -> Plan:
        """Take the next packs; return those of the blocks that are now complete."""
        self._pending = Plan.join([self._pending, plan])
        leveled = []
        while len(self._pending) >= (missing := self.block - self._next % self.block):
            leveled.append(self._level(missing))
        return Plan.join(leveled)

    def finish(self) -> Plan:
        """Return the packs of the incomplete block."""
        return self._level(len(self._pending))

    def _level(self, count: int) -> Plan:
        packs = np.arange(len(self._pending))
        plan = self._pending.take(packs[:count])
        self._pending = self._pending.take(packs[count:])
        block, offset = divmod(self._next, self.block)
        order = np.argsort(self.cost.of_packs(plan), kind="stable")
        self._next += count
        return plan.take(
            _shuffle_groups(order, offset, shuffle_key("level", self.seed, self.epoch, block))
        )


class NoLeveling:
    """The interface of a `Leveler` that keeps the planned order."""

    def feed(self, plan: Plan) -> Plan:
        """Return the plan unchanged."""
        return plan

    def finish(self) -> Plan:
        """Return no packs."""
        return Plan.join([])


def balance_plan(plan: Plan, cost: Cost | None = None, *, block: int = 1024, seed: int = 0) -> Plan:
    """Level a complete plan; see `Leveler`."""
    leveler = Leveler(cost, block=block, seed=seed)
    return Plan.join([leveler.feed(plan), leveler.finish()])


def _shuffle_groups(order: np.ndarray, offset: int, key: np.uint64) -> np.ndarray:
    """Give each group of 64, and in it each group of 8, the next packs by cost, in random order.

    order: the packs by cost; offset: index of the first one's position in the block. At any
    position every cost is equally likely, also in the incomplete groups at both ends.
    """
    positions = np.arange(offset, offset + len(order))
    noise = permute(np.arange(len(order)), len(order), key)
    firsts = [
        np.unique(positions // size, return_index=True, return_inverse=True)[1:] for size in GROUPS
    ]
    by_large, by_small = (noise[first][group] for first, group in firsts)
    shuffled = np.empty_like(order)
    shuffled[np.lexsort((noise, by_small, by_large))] = order
    return shuffled
