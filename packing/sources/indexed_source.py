"""`IndexedSource`: base class of row sources with random access (lists, text files, datasets)."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np

from ..ordering.permutation import permute
from .source import Row, RowSource, even_ranges

BATCH = 256
"""Rows that are requested at a time."""


class IndexedSource(RowSource):
    """Rows with random access: any order, any shard, any position at no cost."""

    shuffles_rows = True

    @abstractmethod
    def __len__(self) -> int: ...

    def num_rows(self) -> int:
        return len(self)

    @abstractmethod
    def rows(self, numbers: np.ndarray) -> list[Any]:
        """Return the rows of these numbers."""

    def ranges(self, count):
        return even_ranges(len(self), count)

    def read_range(self, begin, end):
        for first in range(begin, end, BATCH):
            numbers = np.arange(first, min(end, first + BATCH))
            for number, row in zip(numbers.tolist(), self.rows(numbers), strict=True):
                yield Row(row, f"{self.name}, row {number}", None)

    def read(self, shard, shards, cursor=None, shuffle_key=None):
        n, batch = len(self), BATCH
        for begin in range(cursor[0] if cursor else shard, n, shards * batch):
            positions = np.arange(begin, min(n, begin + shards * batch), shards)
            numbers = positions if shuffle_key is None else permute(positions, n, shuffle_key)
            rows = self.rows(numbers)
            batches = zip(positions.tolist(), numbers.tolist(), rows, strict=True)
            for position, number, row in batches:
                yield Row(row, f"{self.name}, row {number}", [position + shards])
