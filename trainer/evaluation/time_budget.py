"""The time budget of evaluations: at most a share of the run's wall-clock time.

    |── training ──|eval|── training ──|eval|      share = eval / total

An evaluation that would exceed the budget runs on fewer examples, and is skipped if too few would
be left for a meaningful result.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

import numpy as np

MIN_EXAMPLES = 8
"""An evaluation on fewer examples than this is skipped."""


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """The plan of the next evaluation."""

    num_examples: int
    """Examples to run; 0: the evaluation is skipped."""
    deadline: float | None
    """Seconds it may take."""
    note: str | None = None
    """Why it runs on fewer examples, or not at all."""


class TimeBudget:
    """Keep evaluations within a share of the run's time, and each within a deadline."""

    def __init__(
        self,
        max_time_share: float | None = None,
        deadline: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        share_is_valid = isinstance(max_time_share, Real) and 0 < max_time_share < 1
        if max_time_share is not None and not share_is_valid:
            raise ValueError(f"max_time_share is {max_time_share!r}; it must be between 0 and 1")
        if deadline is not None and not (isinstance(deadline, Real) and deadline > 0):
            raise ValueError(f"deadline is {deadline!r}; it must be a number of seconds above 0")
        self.max_time_share, self.deadline = max_time_share, deadline
        self._clock = clock
        self._seconds_per_example: float | None = None
        self.restart()

    def restart(self) -> None:
        """Count the run's time from now on; front ends call it when a training starts."""
        self.spent, self._start = 0.0, self._clock()

    @property
    def time_share(self) -> float:
        """The fraction of the run's time that was spent on evaluations."""
        return self.spent / max(self._clock() - self._start, 1e-9)

    def plan(self, num_examples: int, divisible: bool = True) -> EvalPlan:
        """Plan the next evaluation: on all examples, on fewer, or none.

        divisible: whether it may run on fewer than all examples.
        """
        if self.max_time_share is None:
            return EvalPlan(num_examples, self.deadline)
        elapsed = self._clock() - self._start
        left = (self.max_time_share * elapsed - self.spent) / (1 - self.max_time_share)
        needed = (self._seconds_per_example or 0.0) * num_examples
        limit = left if self.deadline is None else min(left, self.deadline)
        if left > 0 and needed <= left:
            return EvalPlan(num_examples, limit)
        affordable = int(num_examples * max(left, 0.0) / needed) if needed else 0
        reason = f"it would take {needed:.1f} s of {max(left, 0.0):.1f} s left in the time budget"
        if not divisible or affordable < min(MIN_EXAMPLES, num_examples):
            return EvalPlan(0, None, f"skipped: {reason}")
        note = f"reduced to {affordable} of {num_examples} examples: {reason}"
        return EvalPlan(affordable, limit, note)

    def record(self, finished: float | None, seconds: float) -> None:
        """Record an evaluation's seconds and finished examples; None: the evaluation failed."""
        self.spent += seconds
        if finished is not None:
            self._seconds_per_example = seconds / max(finished, 1)


def subset(size: int, count: int) -> list[int]:
    """Pick `count` of `size` indices at random: the same each time, and nested as `count` grows.

    >>> subset(10, 3), subset(10, 5)
    ([2, 4, 6], [2, 3, 4, 6, 7])
    >>> subset(4, 4)
    [0, 1, 2, 3]
    """
    return sorted(np.random.default_rng(0).permutation(size)[:count].tolist())
