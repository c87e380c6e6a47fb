"""What every source of rows promises, and how a bad row is named.

A source gives the rows of one shard of `shards`, in a fixed order, each with a cursor: a few
integers from which reading continues behind that row. Rows that cannot be read come as a
ValueError in their place. A source that knows its rows by number may shuffle them all; one that
only streams leaves shuffling to the window of its reader.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ..ordering.permutation import shuffled
from ..state.run_state import is_count

Cursor = Any
"""Small JSON; None is the beginning."""


class Row(NamedTuple):
    """One row as it was found."""

    value: Any
    """The row, or the ValueError that says why it cannot be read."""
    where: object
    """Its place, whose text is for messages: `data.jsonl, line 7`."""
    cursor: Cursor | Callable[[], Cursor]
    """Where reading continues behind it; a function is asked before the next row is read."""


class RowError(ValueError):
    """A row that cannot be used, with its source, place and reason."""

    def __init__(self, where: object, reason: object):
        super().__init__(where, reason)
        self.where, self.reason = where, " ".join(str(reason).split())[:300]

    def __str__(self) -> str:
        # Not before somebody asks: to name a line, the file before it is read.
        return f'{self.where}: {self.reason} (on_error="skip" leaves such rows out, counted)'


class RowSource(ABC):
    """Rows of text, messages, prompts or token ids whose lengths are not known yet."""

    name: str
    shards: int | None = 8
    """Shards it is cut into unless the user says otherwise."""
    size: int | None = None
    """Bytes, where known: small sources are encoded ahead."""

    @abstractmethod
    def read(
        self, shard: int, shards: int, cursor: Cursor = None, shuffle: np.uint64 | None = None
    ) -> Iterator[Row]:
        """Give the rows of one shard from a cursor on.

        shuffle: the epoch's key, for sources that can give all their rows in another order.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """Identify the rows, so that a state of other data is refused."""

    shuffles = False
    """Whether `read` shuffles by itself."""
    reads_on = False
    """Whether a later place is reached through all rows before it: a state names the earliest."""

    def check_cursor(self, cursor: Any) -> None:
        """Refuse a cursor that this source did not make, before anything is opened by it."""
        numbers = cursor if isinstance(cursor, list) else [] if cursor is None else [cursor]
        if len(numbers) > 2 or not all(is_count(number) for number in numbers):
            raise ValueError(f"{self.name}: the cursor {str(cursor)[:60]!r} is not a place in it")


class Indexed(RowSource):
    """Rows known by number: any order, any shard, any place at no cost."""

    shuffles = True

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def rows(self, numbers: np.ndarray) -> list[Any]:
        """Give some rows."""

    def read(self, shard, shards, cursor=None, shuffle=None):
        n, batch = len(self), 256
        for begin in range(cursor[0] if cursor else shard, n, shards * batch):
            places = np.arange(begin, min(n, begin + shards * batch), shards)
            numbers = places if shuffle is None else shuffled(places, n, shuffle)
            rows = self.rows(numbers)
            for place, number, row in zip(places.tolist(), numbers.tolist(), rows, strict=True):
                yield Row(row, f"{self.name}, row {number}", [place + shards])
