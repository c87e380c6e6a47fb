"""The rows of one shard of one source in their shuffled order, with a place to come back to.

    source ─▶ block of `window` rows ─▶ permuted by key(seed, source, shard, lap, block) ─▶ rows

The order inside a block is a pure function of the key, so there is no shuffle buffer to save: a
state is where the blocks begin that are still needed; of a source that can only be read on, where
the first of them does. Rows are numbered through; a lap is one pass over the source.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice, pairwise

import numpy as np

from ..ordering.permutation import key, shuffled
from ..sources.source import Cursor, Row, RowSource
from ..state.run_state import is_count

PLAIN = 256
"""Rows of a block when nothing is shuffled; only the distance between two marks."""


class ShuffledRows:
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
        """Give the marks that `restore` needs to find these rows, and to continue."""
        firsts = np.array([mark[0] for mark in self.marks], np.int64)
        wanted = np.searchsorted(firsts, np.append(numbers, position), side="right") - 1
        blocks = np.unique(np.maximum(wanted, 0)).tolist()
        if self.source.reads_on:
            laps = [mark for mark in self.marks[blocks[0] + 1 :] if mark[2] == 0]
            return [self.marks[blocks[0]], *laps]
        return [self.marks[i] for i in blocks]

    def restore(self, marks: list[list], position: int, numbers: Iterable[int]) -> dict[int, Row]:
        """Stand before row `position` again, and give the older rows asked for."""
        wanted = set(numbers)
        for first, lap, block, cursor in marks:
            if not all(map(is_count, (first, lap, block))):
                raise ValueError(f"the mark {[first, lap, block]} of a shard is not one")
            self.source.check_cursor(cursor)
        self.marks, found = [], {}
        come_to = self._read_on if self.source.reads_on else self._jump
        for mark, end in pairwise([*marks, [position]]):
            found.update(row for row in come_to(list(mark), end[0]) if row[0] in wanted)
        if self.given != position or len(found) < len(wanted):
            lost = min(wanted - set(found), default=self.given)
            raise ValueError(f"{self.source.name}: row {lost} of shard {self.shard} is not there")
        return found

    def _jump(self, mark: list, end: int) -> Iterable[tuple[int, Row]]:
        """Stand before row `end` of the block of a mark, and give all its rows."""
        self.marks.append(mark)
        self._load(mark)
        rows, self._block = self._block, self._block[end - mark[0] :]
        self.given = end
        return enumerate(rows, mark[0])

    def _read_on(self, mark: list, end: int) -> Iterator[tuple[int, Row]]:
        """Give the rows from a mark on, and stand before row `end`."""
        self.marks.append(mark)
        self._load(mark)
        self.given = mark[0]
        while self.given < end and (some := self.take(end - self.given)):
            yield from some

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
