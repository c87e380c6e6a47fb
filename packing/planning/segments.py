"""Segments: items, or parts of split items, that have no pack yet."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..numba_jit import jit


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """M segments; a segment is an item, or one part of a split item."""

    items: np.ndarray
    """int64 [M]: the item of each segment."""
    starts: np.ndarray
    """int64 [M]: first token of the segment inside its item."""
    lengths: np.ndarray
    """int64 [M]: tokens of the segment."""

    def __len__(self) -> int:
        return len(self.items)

    @property
    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.items, self.starts, self.lengths

    def take(self, indices: np.ndarray) -> Segments:
        """Return the segments at these indices, in this order."""
        return Segments(*_take(*self.columns, indices))

    def append(self, other: Segments) -> Segments:
        """Return these segments followed by the others."""
        return Segments(*map(np.concatenate, zip(self.columns, other.columns, strict=True)))

    def append_items(self, first: int, lengths: np.ndarray) -> Segments:
        """Return these segments followed by full items, numbered from `first`."""
        return Segments(*_append_items(*self.columns, first, lengths))

    @classmethod
    def empty(cls) -> Segments:
        return cls(*(np.zeros(0, np.int64) for _ in range(3)))


@jit
def _take(items, starts, lengths, indices):
    """Gather three columns in one loop; returning one array is faster than returning three."""
    columns = np.empty((3, len(indices)), np.int64)
    for n in range(len(indices)):
        i = indices[n]
        columns[0, n] = items[i]
        columns[1, n] = starts[i]
        columns[2, n] = lengths[i]
    return columns


@jit
def _append_items(items, starts, lengths, first, item_lengths):
    """Append full items to the three columns."""
    m = len(items)
    columns = np.empty((3, m + len(item_lengths)), np.int64)
    for n in range(m):
        columns[0, n] = items[n]
        columns[1, n] = starts[n]
        columns[2, n] = lengths[n]
    for n in range(len(item_lengths)):
        columns[0, m + n] = first + n
        columns[1, m + n] = 0
        columns[2, m + n] = item_lengths[n]
    return columns
