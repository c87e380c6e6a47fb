"""Segments: items, or parts of them, that have no pack yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """M segments in order of arrival."""

    items: np.ndarray
    """int64 [M]: the item each segment comes from."""
    starts: np.ndarray
    """int64 [M]: first token of the segment inside its item."""
    lengths: np.ndarray
    """int64 [M]: tokens of the segment."""

    def __len__(self) -> int:
        return len(self.items)

    def take(self, places: np.ndarray) -> Segments:
        """Give the segments at these places, in this order."""
        return Segments(self.items[places], self.starts[places], self.lengths[places])

    @classmethod
    def join(cls, several: Sequence[Segments]) -> Segments:
        """Lay groups of segments one behind the other."""
        if len(several) == 1:
            return several[0]
        empty = np.zeros(0, np.int64)
        return cls(
            np.concatenate([empty, *(group.items for group in several)]),
            np.concatenate([empty, *(group.starts for group in several)]),
            np.concatenate([empty, *(group.lengths for group in several)]),
        )
