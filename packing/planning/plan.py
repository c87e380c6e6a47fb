"""A plan: which segments of which items are in which pack, in pure integers.

    items     [ 0 2 | 1 3 3 ]      segment 4 is the second part of item 3
    starts    [ 0 0 | 0 0 7 ]
    lengths   [ 5 3 | 2 7 1 ]
    offsets   [ 0     2       5 ]

A plan knows nothing about tokens: it can be made, checked, leveled and counted without them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """P packs of M segments; a segment is an item, or one part of a split item.

    >>> plan = Plan(*map(np.array, ([0, 2, 1], [0, 0, 0], [5, 3, 6], [0, 2, 3])))
    >>> [pack.tolist() for pack in plan], plan.tokens.tolist(), plan.fill(budget=8)
    ([[0, 2], [1]], [8, 6], 0.875)
    """

    items: np.ndarray
    """int64 [M]: the item of each segment, numbered by arrival from 0."""
    starts: np.ndarray
    """int64 [M]: first token of the segment inside its item; 0 unless the item was split."""
    lengths: np.ndarray
    """int64 [M]: tokens of the segment."""
    offsets: np.ndarray
    """int64 [P+1]: pack p holds the segments offsets[p]:offsets[p+1]."""

    def __post_init__(self):
        assert len(self.items) == len(self.starts) == len(self.lengths) == self.offsets[-1]
        assert self.offsets[0] == 0

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[p] for p in range(len(self)))

    def __getitem__(self, pack: int) -> np.ndarray:
        """Return the items of one pack."""
        return self.items[self.segments(pack)]

    def segments(self, pack: int) -> slice:
        """Return the slice of one pack's segments in `items`, `starts` and `lengths`."""
        if not -len(self) <= pack < len(self):
            raise IndexError(f"pack {pack} of a plan of {len(self)}")
        pack %= len(self)
        return slice(int(self.offsets[pack]), int(self.offsets[pack + 1]))

    @property
    def tokens(self) -> np.ndarray:
        """int64 [P]: tokens in each pack."""
        return self.sum_per_pack(self.lengths)

    def fill(self, budget: int) -> float:
        """Return the fraction of all packs' budget that holds tokens."""
        return int(self.lengths.sum()) / (budget * len(self)) if len(self) else 0.0

    def sum_per_pack(self, values: np.ndarray) -> np.ndarray:
        """Sum `values`, one per segment, over each pack."""
        totals = np.concatenate([np.zeros(1, values.dtype), np.cumsum(values)])
        return totals[self.offsets[1:]] - totals[self.offsets[:-1]]

    def take(self, packs: np.ndarray) -> Plan:
        """Return the plan of these packs, in this order."""
        counts = np.diff(self.offsets)[packs]
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        segments = np.arange(offsets[-1]) + np.repeat(self.offsets[packs] - offsets[:-1], counts)
        return Plan(self.items[segments], self.starts[segments], self.lengths[segments], offsets)

    @classmethod
    def join(cls, plans: Sequence[Plan]) -> Plan:
        """Concatenate plans."""
        if not plans:
            return cls(*(np.zeros(n, np.int64) for n in (0, 0, 0, 1)))
        ends = np.cumsum([0, *(plan.offsets[-1] for plan in plans)])
        shifted = [plan.offsets[1:] + end for plan, end in zip(plans, ends[:-1], strict=True)]
        return cls(
            np.concatenate([plan.items for plan in plans]),
            np.concatenate([plan.starts for plan in plans]),
            np.concatenate([plan.lengths for plan in plans]),
            np.concatenate([np.zeros(1, np.int64), *shifted]),
        )
