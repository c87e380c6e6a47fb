"""Segments: items, or parts of them, that have no pack yet."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..jit import jit


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """M segments; a segment is an item, or a part of a split one."""

    items: np.ndarray
    """int64 [M]: the item each segment comes from."""
    starts: np.ndarray
    """int64 [M]: first token of the segment inside its item."""
    lengths: np.ndarray
    """int64 [M]: tokens of the segment."""

    def __len__(self) -> int:
        return len(self.items)

    @property
    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.items, self.starts, self.lengths

    def take(self, places: np.ndarray) -> Segments:
        """Give the segments at these places, in this order."""
        return Segments(*_take(*self.columns, places))

    def followed_by(self, other: Segments) -> Segments:
        """Give these segments and then the others."""
        return Segments(*map(np.concatenate, zip(self.columns, other.columns, strict=True)))

    def followed_by_items(self, first: int, lengths: np.ndarray) -> Segments:
        """Give these segments and then whole items, numbered from `first`."""
        return Segments(*_append(*self.columns, first, lengths))

    @classmethod
    def none(cls) -> Segments:
        """Give no segments."""
        return cls(*(np.zeros(0, np.int64) for _ in range(3)))


@jit
def _take(items, starts, lengths, places):
    """Gather three columns in one pass over the places; one array comes back quicker than three."""
    columns = np.empty((3, len(places)), np.int64)
    for n in range(len(places)):
        place = places[n]
        columns[0, n] = items[place]
        columns[1, n] = starts[place]
        columns[2, n] = lengths[place]
    return columns


@jit
def _append(items, starts, lengths, first, more):
    """Lay whole items behind three columns."""
    m = len(items)
    columns = np.empty((3, m + len(more)), np.int64)
    columns[0, :m] = items
    columns[1, :m] = starts
    columns[2, :m] = lengths
    columns[1, m:] = 0
    for n in range(len(more)):
        columns[0, m + n] = first + n
        columns[2, m + n] = more[n]
    return columns
