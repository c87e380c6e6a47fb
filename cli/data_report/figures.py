"""Histogram of sample lengths, and packs, fill and padding for several budgets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...packing import MAX_BUDGET, pack_lengths
from ...packing.planning import padded_fill


class Bin(NamedTuple):
    """A bar of the histogram: how many samples have from `low` to `high` tokens."""

    low: int
    high: int
    samples: int


def length_bins(lengths: np.ndarray) -> list[Bin]:
    """Count the samples between powers of two.

    >>> length_bins(np.array([1, 2, 3, 9]))[-2:]
    [Bin(low=4, high=7, samples=0), Bin(low=8, high=15, samples=1)]
    """
    exponents = np.floor(np.log2(lengths)).astype(int)
    counts = np.bincount(exponents).tolist()
    return [Bin(1 << e, (2 << e) - 1, counts[e]) for e in range(int(exponents.min()), len(counts))]


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """What one budget gives."""

    budget: int
    packs: int
    fill: float | None
    """None if every sample was dropped."""
    samples_per_pack: float | None
    num_long: int
    """Samples longer than a pack."""
    padded: float
    """The fill of padded batches of as many positions."""

    @property
    def step_ratio(self) -> float:
        """How many times the steps of packing padding takes."""
        return (self.fill or 1.0) / self.padded


def budget_rows(
    lengths: np.ndarray, budget: int, overflow: Any, max_length: int | None = None
) -> list[BudgetRow]:
    """Return the figures of a quarter, half, one and two times the budget, where that is possible.

    >>> [(row.budget, row.packs, row.fill) for row in budget_rows(np.full(64, 32), 128, "split")]
    [(32, 64, 1.0), (64, 32, 1.0), (128, 16, 1.0), (256, 8, 1.0)]
    """
    rows = []
    for each in (budget // 4, budget // 2, budget, budget * 2):
        num_long = int((lengths > min(each, max_length or each)).sum())
        if not 1 <= each <= MAX_BUDGET or (overflow == "error" and num_long):
            continue
        plan = pack_lengths(lengths, each, overflow=overflow, max_length=max_length)
        fill = per_pack = None
        if len(plan):
            fill = int(plan.lengths.sum()) / (len(plan) * each)
            per_pack = len(plan.lengths) / len(plan)
        padded = padded_fill(lengths, each, overflow, max_length)
        rows.append(BudgetRow(each, len(plan), fill, per_pack, num_long, padded))
    return rows
