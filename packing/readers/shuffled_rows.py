"""Block-shuffled rows of one shard of one source, resumable across repeated reads.

    source ─▶ block of rows ─▶ permuted by shuffle_key(seed, source, shard, lap, block) ─▶ rows

The order inside a block is a pure function of the key, so there is no shuffle buffer to save: a
state holds the starts of the blocks that are still needed; for a source that can only be read
sequentially, the start of the first of them. Rows are numbered consecutively over all laps; a lap
is one complete read of the source.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice, pairwise

import numpy as np

from ..ordering.permutation import permute, shuffle_key
from ..sources.source import Cursor, Row, RowSource
from ..state.run_state import is_non_negative_int

UNSHUFFLED_BLOCK = 256
"""Rows of a block without shuffling: only the distance between two marks."""


class ShuffledRows:
    """Yields the rows of a shard, read after read, and can find any of them again."""

    def __init__(
        self,
        source: RowSource,
        shard: int = 0,
        shards: int = 1,
        *,
        seed: int = 0,
        shuffle_block: int = 0,
        source_index: int = 0,
        lap: int = 0,
    ):
        """Open one shard of a source; shuffle_block: rows shuffled together, 0 keeps the order."""
        self.source, self.shard, self.shards = source, shard, shards
        self.seed, self.shuffle_block, self.source_index = seed, shuffle_block, source_index
        self.next_row = 0
        """Number of the next row."""
        self.block_marks: list[list] = [[0, lap, 0, None]]
        """[number of its first row, lap, block, cursor] of every block still needed."""
        self._block: list[Row] = []
        self._rows: Iterator[Row] | None = None
        self._end: Cursor = None
        self._error: Exception | None = None

    def take(self, count: int) -> list[tuple[int, Row]]:
        """Return up to `count` next rows with their numbers; none when the lap has ended."""
        if self._rows is None:
            self._load(self.block_marks[-1])
        if not self._block and not self._next_block():
            return []
        rows, self._block = self._block[:count], self._block[count:]
        numbered = list(enumerate(rows, self.next_row))
        self.next_row += len(rows)
        return numbered

    def next_lap(self) -> None:
        """Start reading the source again."""
        _, lap, _, _ = self.block_marks[-1]
        self.block_marks.append([self.next_row, lap + 1, 0, None])
        self._load(self.block_marks[-1])

    def drop_before(self, needed: int) -> None:
        """Drop the marks of blocks before the one that contains row `needed`."""
        while len(self.block_marks) > 1 and self.block_marks[1][0] <= needed:
            self.block_marks.pop(0)

    def marks_for(self, numbers: np.ndarray, position: int) -> list[list]:
        """Return the marks that `restore` needs to find these rows, and to continue."""
        firsts = np.array([mark[0] for mark in self.block_marks], np.int64)
        needed = np.searchsorted(firsts, np.append(numbers, position), side="right") - 1
        blocks = np.unique(np.maximum(needed, 0)).tolist()
        if self.source.sequential_only:
            lap_starts = [mark for mark in self.block_marks[blocks[0] + 1 :] if mark[2] == 0]
            return [self.block_marks[blocks[0]], *lap_starts]
        return [self.block_marks[i] for i in blocks]

    def restore(self, marks: list[list], position: int, numbers: Iterable[int]) -> dict[int, Row]:
        """Continue before row `position`, and return the earlier rows of these numbers."""
        needed = set(numbers)
        for first, lap, block, cursor in marks:
            if not all(map(is_non_negative_int, (first, lap, block))):
                raise ValueError(f"the mark {[first, lap, block]} of a shard is invalid")
            self.source.check_cursor(cursor)
        self.block_marks, rows = [], {}
        advance = self._read_to if self.source.sequential_only else self._jump_to
        for mark, end in pairwise([*marks, [position]]):
            rows.update(row for row in advance(list(mark), end[0]) if row[0] in needed)
        if self.next_row != position or len(rows) < len(needed):
            missing = min(needed - set(rows), default=self.next_row)
            raise ValueError(
                f"{self.source.name}: row {missing} of shard {self.shard} does not exist"
            )
        return rows

    def _jump_to(self, mark: list, end: int) -> Iterable[tuple[int, Row]]:
        """Go to row `end` in the block of a mark, and return all rows of the block."""
        self.block_marks.append(mark)
        self._load(mark)
        rows, self._block = self._block, self._block[end - mark[0] :]
        self.next_row = end
        return enumerate(rows, mark[0])

    def _read_to(self, mark: list, end: int) -> Iterator[tuple[int, Row]]:
        """Read and yield the rows from a mark to before row `end`."""
        self.block_marks.append(mark)
        self._load(mark)
        self.next_row = mark[0]
        while self.next_row < end and (rows := self.take(end - self.next_row)):
            yield from rows

    def _next_block(self) -> bool:
        if self._error is not None:
            raise self._error
        _, lap, block, _ = self.block_marks[-1]
        if self._end is None:
            return False
        self.block_marks.append([self.next_row, lap, block + 1, self._end])
        self._read_block(lap, block + 1)
        return bool(self._block)

    def _load(self, mark: list) -> None:
        """Read the block of a mark."""
        _, lap, block, cursor = mark
        shuffles = self.source.shuffles_rows and self.shuffle_block
        key = self._key("lap", lap) if shuffles else None
        self._rows = self.source.read(self.shard, self.shards, cursor, key)
        self._read_block(lap, block)

    def _read_block(self, lap: int, block: int) -> None:
        assert self._rows is not None
        shuffles = self.shuffle_block > 0 and not self.source.shuffles_rows
        size = self.shuffle_block if shuffles else UNSHUFFLED_BLOCK
        rows: list[Row] = []
        self._end = None
        try:
            for row in islice(self._rows, size):
                rows.append(row)
                if len(rows) == size:
                    self._end = row.cursor() if callable(row.cursor) else row.cursor
        except Exception as error:  # rows read before the error are returned first
            self._error = error
            if shuffles or not rows:
                raise
        if shuffles:
            order = permute(np.arange(len(rows)), len(rows), self._key("block", lap, block))
            rows = [rows[i] for i in order.tolist()]
        self._block = rows

    def _key(self, *parts: int | str) -> np.uint64:
        shard = 0 if self.source.shuffles_rows else self.shard
        return shuffle_key(*parts, self.seed, self.source_index, shard)
