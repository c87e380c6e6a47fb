"""Lengths and starts of documents in a mapped index, which the processes of a machine share.

An array of starts for 10^9 documents would take 8 GB in every process.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

CHUNK = 1 << 20
"""Documents that are checked at a time."""


class MappedBegins:
    """Positions of documents in tokens, computed from byte offsets on request.

    >>> MappedBegins(np.array([0, 6, 10]), 2)[np.array([2, 1])].tolist()
    [5, 3]
    """

    def __init__(self, byte_offsets: np.ndarray, itemsize: int):
        self.byte_offsets, self.itemsize = byte_offsets, itemsize

    def __len__(self) -> int:
        return len(self.byte_offsets)

    def __getitem__(self, documents):
        return self.byte_offsets[documents] // self.itemsize

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.asarray(self[:], dtype)

    def are_contiguous(self, lengths: np.ndarray) -> bool:
        """Return whether each begins where the previous one ends, and none inside a token."""
        end = 0
        for some in chunks(len(self)):
            byte_offsets, ends = self.byte_offsets[some], end + np.cumsum(lengths[some], dtype="i8")
            begins = np.concatenate([[end], ends[:-1]])
            if not np.array_equal(byte_offsets, begins * self.itemsize):
                return False
            end = int(ends[-1])
        return True


def is_arange(values: np.ndarray) -> bool:
    """Return whether the values are 0, 1, 2 and so on."""
    return all(
        np.array_equal(values[some], np.arange(some.start, some.stop))
        for some in chunks(len(values))
    )


def chunks(count: int) -> Iterator[slice]:
    """Yield slices of at most CHUNK entries."""
    for begin in range(0, count, CHUNK):
        yield slice(begin, min(begin + CHUNK, count))
