"""Tokens in a remote file, read in ranges: the counterpart of a memory-mapped array."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from .remote_file import RemoteFile

NEAR_BYTES = 64 << 10
"""Ranges with fewer bytes between them are requested as one."""
SCAN_TOKENS = 1 << 22


class RemoteTokens:
    """A one-dimensional array of token ids that can be read by slices and segments."""

    def __init__(self, file: RemoteFile, dtype: np.dtype):
        if file.size % dtype.itemsize:
            raise ValueError(
                f"{file} has {file.size} bytes, not a multiple of {dtype} tokens: it is truncated"
            )
        self.file, self.dtype = file, dtype
        self.shape = (file.size // dtype.itemsize,)
        self.nbytes, self.itemsize = file.size, dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, tokens: slice) -> np.ndarray:
        begin, end, _ = tokens.indices(len(self))
        return self._decode(self.file.read(begin * self.itemsize, end * self.itemsize))

    def pieces(self, ranges: Sequence[tuple[int, int]]) -> Iterator[np.ndarray]:
        """Yield several ranges of tokens, which are requested together."""
        spans = [(begin * self.itemsize, end * self.itemsize) for begin, end in ranges]
        return map(self._decode, self.file.read_ranges(spans))

    def positions(self, token: int) -> np.ndarray:
        """Read all tokens, and return where this one occurs."""
        found, begin = [np.zeros(0, np.int64)], 0
        with self.file.open() as file:
            while data := file.read(SCAN_TOKENS * self.itemsize):
                found.append(begin + np.flatnonzero(self._decode(data) == token))
                begin += len(data) // self.itemsize
        return np.concatenate(found)

    def documents(
        self, begins: np.ndarray, ends: np.ndarray
    ) -> Iterator[tuple[slice, np.ndarray, int]]:
        """Read all documents in runs: yield which they are, their tokens, and the first of these.

        begins, ends: of the documents, in their order in the file.
        """
        cuts = np.searchsorted(begins, np.arange(0, len(self), SCAN_TOKENS))
        for first, last in pairwise([*np.unique(cuts).tolist(), len(begins)]):
            if first < last:
                begin = int(begins[first])
                yield slice(first, last), self[begin : int(ends[last - 1])], begin

    def segments(self, froms: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return an array that contains these segments, and where each begins in it."""
        ranges, begins = merge_ranges(froms, lengths, NEAR_BYTES // self.itemsize)
        flat = np.concatenate(list(self.pieces(ranges)))
        flat.flags.writeable = False  # as memory-mapped arrays, for which loops are compiled
        return flat, begins

    def _decode(self, data: bytes) -> np.ndarray:
        return np.frombuffer(data, self.dtype)


def merge_ranges(
    froms: np.ndarray, lengths: np.ndarray, gap: int
) -> tuple[list[tuple[int, int]], np.ndarray]:
    """Merge segments at most `gap` apart into ranges; return them, and each segment's place there.

    >>> merge_ranges(np.array([90, 0, 6]), np.array([5, 4, 4]), gap=2)
    ([(0, 10), (90, 95)], array([10,  0,  6]))
    """
    order = np.argsort(froms, kind="stable")
    begins, ends = froms[order], np.maximum.accumulate((froms + lengths)[order])
    first = np.append(True, begins[1:] - ends[:-1] > gap)
    starts = begins[first]
    stops = np.append(ends[:-1][first[1:]], ends[-1])
    before = np.cumsum(stops - starts) - (stops - starts)
    range_of = np.cumsum(first) - 1
    places = np.empty(len(froms), np.int64)
    places[order] = begins - starts[range_of] + before[range_of]
    return list(zip(starts.tolist(), stops.tolist(), strict=True)), places
