"""The rows of one shard of one source in their shuffled order, with a place to come back to.

    source ─▶ block of `window` rows ─▶ permuted by key(seed, source, shard, lap, block) ─▶ rows

The order inside a block is a pure function of the key, so there is no shuffle buffer to save: a
state is where the blocks begin that are still needed. Rows are numbered through; a lap is one
pass over the source.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np

from .order import key, shuffled
from .sources.source import Cursor, Row, RowSource
from .state import is_count

PLAIN = 256
"""Rows of a block when nothing is shuffled; only the distance between two marks."""


class RowsInOrder:
    """Gives the rows of a shard, lap after lap, and finds any of them again."""

    def __init__(
        self,
        source: RowSource,
        shard: int = 0,
        shards: int = 1,
        *,
        seed: int = 0,
        window: int = 0,
        number: int = 0,
        lap: int = 0,
    ):
        """Open one shard of source `number` of a mixture; window 0 keeps the source's order."""
        self.source, self.shard, self.shards = source, shard, shards
        self.seed, self.window, self.number = seed, window, number
        self.given = 0
        """Rows given so far."""
        self.marks: list[list] = [[0, lap, 0, None]]
        """[number of its first row, lap, block, cursor] of every block still needed."""
        self._block: list[Row] = []
        self._rows: Iterator[Row] | None = None
        self._end: Cursor = None
        self._broken: Exception | None = None

    def take(self, count: int) -> list[tuple[int, Row]]:
        """Give up to `count` next rows with their numbers; none when the lap is over."""
        if self._rows is None:
            self._load(self.marks[-1])
        if not self._block and not self._next_block():
            return []
        some, self._block = self._block[:count], self._block[count:]
        numbered = list(enumerate(some, self.given))
        self.given += len(some)
        return numbered

    def next_lap(self) -> None:
        """Begin the next pass over the source."""
        _, lap, _, _ = self.marks[-1]
        self.marks.append([self.given, lap + 1, 0, None])
        self._load(self.marks[-1])

    def forget(self, needed: int) -> None:
        """Let go of the blocks before the one that holds row `needed`."""
        while len(self.marks) > 1 and self.marks[1][0] <= needed:
            self.marks.pop(0)

    def marks_of(self, numbers: np.ndarray, position: int) -> list[list]:
        """Give the marks of the blocks that hold these rows, and of the one to continue in."""
        firsts = np.array([mark[0] for mark in self.marks], np.int64)
        wanted = np.searchsorted(firsts, np.append(numbers, position), side="right") - 1
        return [self.marks[i] for i in np.unique(np.maximum(wanted, 0))]

    def restore(self, marks: list[list], position: int, numbers: Iterable[int]) -> dict[int, Row]:
        """Stand before row `position` again, and give the older rows asked for."""
        wanted, found = set(numbers), {}
        self.marks = [list(mark) for mark in marks]
        for first, lap, block, cursor in self.marks:
            if not all(map(is_count, (first, lap, block))):
                raise ValueError(f"the mark {[first, lap, block]} of a shard is not one")
            self.source.check_cursor(cursor)
        for mark in self.marks:
            self._load(mark)
            for number, row in enumerate(self._block, mark[0]):
                if number in wanted:
                    found[number] = row
        if len(found) < len(wanted):
            lost = min(wanted - set(found))
            raise ValueError(f"{self.source.name}: row {lost} of shard {self.shard} is not there")
        self.given = position
        self._block = self._block[position - self.marks[-1][0] :]
        return found

    def _next_block(self) -> bool:
        if self._broken is not None:
            raise self._broken
        _, lap, block, _ = self.marks[-1]
        if self._end is None:
            return False
        self.marks.append([self.given, lap, block + 1, self._end])
        self._fill(lap, block + 1)
        return bool(self._block)

    def _load(self, mark: list) -> None:
        """Read the block of a mark, and be ready for the one behind it."""
        _, lap, block, cursor = mark
        whole = self._key("lap", lap) if self.source.shuffles and self.window else None
        self._rows = self.source.read(self.shard, self.shards, cursor, whole)
        self._fill(lap, block)

    def _fill(self, lap: int, block: int) -> None:
        assert self._rows is not None
        shuffles = self.window > 0 and not self.source.shuffles
        size = self.window if shuffles else PLAIN
        rows: list[Row] = []
        self._end = None
        try:
            for row in islice(self._rows, size):
                rows.append(row)
                if len(rows) == size:
                    self._end = row.cursor() if callable(row.cursor) else row.cursor
        except Exception as error:  # what was read before it is given first
            self._broken = error
            if shuffles or not rows:
                raise
        if shuffles:
            order = shuffled(np.arange(len(rows)), len(rows), self._key("block", lap, block))
            rows = [rows[i] for i in order.tolist()]
        self._block = rows

    def _key(self, *parts: int | str) -> np.uint64:
        return key(*parts, self.seed, self.number, 0 if self.source.shuffles else self.shard)
