"""The newest of a stream of numbers, in memory that does not grow."""

from __future__ import annotations

import numpy as np


class RingBuffer:
    """The last `limit` rows of those added.

    >>> window = Window(limit=3)
    >>> window.add(np.array([1.0, 2.0])); window.add(np.array([3.0, 4.0]))
    >>> window.rows().tolist()
    [2.0, 3.0, 4.0]
    """

    def __init__(self, *shape: int, limit: int = 1 << 16):
        self._rows = np.empty((limit, *shape))
        self._count = 0

    def __len__(self) -> int:
        return min(self._count, len(self._rows))

    def add(self, rows: np.ndarray) -> None:
        """Put rows behind those there are; the oldest make room."""
        limit = len(self._rows)
        rows = rows[-limit:]
        at = (self._count + np.arange(len(rows))) % limit
        self._rows[at] = rows
        self._count += len(rows)

    def rows(self) -> np.ndarray:
        """What is held, oldest first."""
        if self._count <= len(self._rows):
            return self._rows[: self._count]
        return np.roll(self._rows, -(self._count % len(self._rows)), axis=0)
