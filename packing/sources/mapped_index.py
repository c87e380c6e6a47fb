"""Lengths and starts of documents in a mapped index, which the processes of a machine share.

An array of starts for 10^9 documents would take 8 GB in every process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..numba_jit import jit

CHUNK = 1 << 20
"""Documents that are checked at a time."""
BLOCK = 256
"""Documents between two positions that are kept in memory."""


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


class SummedBegins:
    """Positions of contiguous documents, summed up from their lengths on request.

    >>> SummedBegins(np.array([3, 2, 4]))[np.array([2, 1])].tolist()
    [5, 3]
    """

    def __init__(self, lengths: np.ndarray):
        self.lengths = lengths
        firsts = np.arange(0, len(lengths), BLOCK)
        sums = np.add.reduceat(lengths, firsts, dtype=np.int64) if len(lengths) else firsts
        self._block_begins = np.cumsum(sums) - sums

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, documents):
        if isinstance(documents, slice):
            documents = np.arange(*documents.indices(len(self)))
        found = _sum_lengths(self.lengths, self._block_begins, np.atleast_1d(documents))
        return found if np.ndim(documents) else found[0]

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.asarray(self[:], dtype)


@jit
def _sum_lengths(lengths, block_begins, documents):
    """Return where documents begin."""
    begins = np.empty(len(documents), np.int64)
    for i in range(len(documents)):
        block = documents[i] // BLOCK
        begins[i] = block_begins[block]
        for document in range(block * BLOCK, documents[i]):
            begins[i] += lengths[document]
    return begins


IN_MEMORY = 1 << 24
"""Documents whose lengths are copied into one array; those of more stay in their index files."""


def join_lengths(parts: Sequence[np.ndarray]) -> np.ndarray | JoinedLengths:
    """Return the lengths of several arrays as one."""
    if len(parts) == 1:
        return parts[0]
    if sum(map(len, parts)) <= IN_MEMORY:
        return np.concatenate([np.zeros(0, np.int64), *parts])
    return JoinedLengths(parts)


class JoinedLengths:
    """Lengths that stay in several mapped files, read by the numbers of documents.

    >>> JoinedLengths([np.array([5, 6]), np.array([7])])[np.array([2, 0])].tolist()
    [7, 5]
    """

    def __init__(self, parts: Sequence[np.ndarray]):
        self.parts = parts
        self.firsts = np.cumsum([0, *map(len, parts)])

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def __getitem__(self, documents: np.ndarray | slice) -> np.ndarray:
        if isinstance(documents, slice):
            documents = np.arange(*documents.indices(len(self)))
        order = np.argsort(documents, kind="stable")
        cuts = np.searchsorted(documents[order], self.firsts)
        found = np.empty(len(documents), np.int64)
        for part in np.flatnonzero(np.diff(cuts)).tolist():
            some = order[cuts[part] : cuts[part + 1]]
            found[some] = self.parts[part][documents[some] - self.firsts[part]]
        return found

    def max(self, initial: int = 0) -> int:
        """Return the largest length."""
        return max([initial, *(int(part.max(initial=initial)) for part in self.parts)])


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
