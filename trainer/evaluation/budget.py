"""How much time evaluations may take: a share of the run's, and how to stay within it.

    |── training ──|eval|── training ──|eval|      share = eval / all

An evaluation that would take too long is cut down to as many examples as there is time for, and
left out where that would be too few to mean anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

import numpy as np

LEAST = 8
"""Fewer examples than this are not worth an evaluation."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What the next evaluation may do."""

    examples: int
    """How many of them; 0: none, it is left out."""
    deadline: float | None
    """Seconds it may take."""
    note: str | None = None
    """Why it is less than all."""


class Budget:
    """Keep evaluations within a share of the run's time, and each within a deadline."""

    def __init__(
        self,
        max_share: float | None = None,
        deadline: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        if max_share is not None and not (isinstance(max_share, Real) and 0 < max_share < 1):
            raise ValueError(f"max_share is {max_share!r}; it must lie between 0 and 1")
        if deadline is not None and not (isinstance(deadline, Real) and deadline > 0):
            raise ValueError(f"deadline is {deadline!r}; it must be seconds above 0")
        self.max_share, self.deadline = max_share, deadline
        self.spent = 0.0
        self._clock = clock
        self._began = clock()
        self._per_example: float | None = None

    @property
    def share(self) -> float:
        """The part of the time since the beginning that went into evaluations."""
        return self.spent / max(self._clock() - self._began, 1e-9)

    def allowance(self, examples: int, divisible: bool = True) -> Allowance:
        """Say how many of so many examples there is time for.

        divisible: whether fewer than all of them may be run.
        """
        if self.max_share is None:
            return Allowance(examples, self.deadline)
        elapsed = self._clock() - self._began
        left = (self.max_share * elapsed - self.spent) / (1 - self.max_share)
        needed = (self._per_example or 0.0) * examples
        limit = left if self.deadline is None else min(left, self.deadline)
        if left > 0 and needed <= left:
            return Allowance(examples, limit)
        fitting = int(examples * max(left, 0.0) / needed) if needed else 0
        times = f"it would take {needed:.1f} s of {max(left, 0.0):.1f} s left in the budget"
        if not divisible or fitting < min(LEAST, examples):
            return Allowance(0, None, f"left out: {times}")
        return Allowance(fitting, limit, f"cut to {fitting} of {examples} examples: {times}")

    def note(self, finished: int | None, seconds: float) -> None:
        """Remember what an evaluation took, and how many examples it finished; None: it failed."""
        self.spent += seconds
        if finished is not None:
            self._per_example = seconds / max(finished, 1)


def subset(size: int, count: int) -> list[int]:
    """Choose `count` of `size` at random, the same every time, more of them including fewer.

    >>> subset(10, 3), subset(10, 5)
    ([2, 4, 6], [2, 3, 4, 6, 7])
    >>> subset(4, 4)
    [0, 1, 2, 3]
    """
    return sorted(np.random.default_rng(0).permutation(size)[:count].tolist())
