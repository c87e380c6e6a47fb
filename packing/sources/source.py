"""The interface of row sources, and the error for a bad row.

A source yields the rows of one shard of `shards` in a fixed order, each with a cursor: a few
integers from which reading continues after that row. Rows that cannot be read are yielded as a
ValueError in their position. A source with random access (`IndexedSource`) can shuffle all its
rows; a source that can only be streamed leaves shuffling to the blocks of its reader.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ..state.run_state import is_non_negative_int

TEXT_COLUMN = "text"
"""The column with the text, unless the user names another."""
SMALL_BYTES = 64 << 20
"""Decompressed bytes up to which a source is small: it is encoded before training starts."""
Cursor = Any
"""Small JSON; None is the beginning."""


class Row(NamedTuple):
    """One row as it was read."""

    value: Any
    """The row, or the ValueError that says why it cannot be read."""
    location: object
    """Its text is for messages: `data.jsonl, line 7`."""
    cursor: Cursor | Callable[[], Cursor]
    """Where reading continues after this row; a function is called before the next row is read."""


class RowError(ValueError):
    """A row that cannot be used, with its location and the reason."""

    def __init__(self, location: object, reason: object):
        super().__init__(location, reason)
        self.location, self.reason = location, " ".join(str(reason).split())[:300]

    def __str__(self) -> str:
        # Computed only on demand: to number a line, the file before it is read.
        return f'{self.location}: {self.reason} (pass on_error="skip" to skip and count such rows)'


class RowSource(ABC):
    """Rows of text, messages, prompts or token ids whose lengths are not known yet."""

    name: str
    default_shards: int | None = 8
    """Number of shards unless the user chooses one."""
    paths: Sequence[Any] = ()
    """The files that the rows are in, if any."""
    num_bytes: int | None = None
    """Decompressed size of the data, if known; beyond SMALL_BYTES, an estimate."""

    @abstractmethod
    def read(
        self, shard: int, shards: int, cursor: Cursor = None, shuffle_key: np.uint64 | None = None
    ) -> Iterator[Row]:
        """Yield the rows of one shard from a cursor on.

        shuffle_key: the key of this read, for sources that can read their rows in any order.
        """

    def ranges(self, count: int) -> list[tuple[int, int]] | None:
        """Cut the rows, in their order, into about `count` ranges that can be read independently.

        Returns None if the rows can only be read one after the other.
        """
        return None

    def read_range(self, begin: int, end: int) -> Iterator[Row]:
        """Yield the rows of one of the `ranges`; a source without ranges has none to pass."""
        raise ValueError(f"{self.name} is read from its start: it has no ranges")

    def first(self) -> Row | None:
        """Return the first row, which `read` still yields; None if there is none."""
        return next(self.read(0, 1), None)

    def num_rows(self) -> int | None:
        """Return the approximate number of rows without reading them; None if it is unknown."""
        return None

    def row_bytes(self, row: Any) -> int:
        """Return the approximate size of a row in `num_bytes`: its size as text or JSON."""
        return len(str(row).encode(errors="replace")) + 1

    @abstractmethod
    def fingerprint(self) -> str:
        """Identify the rows, so that a state of other data is rejected."""

    def cache_key(self) -> str | None:
        """Identify all content of the rows; None if it cannot be known before they are read."""
        return None

    shuffles_rows = False
    """Whether `read` shuffles by its `shuffle_key`."""
    sequential_only = False
    """Whether a position is reached only by reading all rows before it: a state identifies such a
    source by its first row."""

    def check_cursor(self, cursor: Any) -> None:
        """Raise if this source did not make the cursor, before anything is opened with it."""
        numbers = cursor if isinstance(cursor, list) else [] if cursor is None else [cursor]
        if len(numbers) > 2 or not all(is_non_negative_int(number) for number in numbers):
            raise cursor_error(self.name, cursor)


def cursor_error(name: str, cursor: Any) -> ValueError:
    """Build the error for a cursor that is not a position in the source."""
    return ValueError(f"{name}: the cursor {str(cursor)[:60]!r} is not a position in it")


def even_ranges(size: int, count: int) -> list[tuple[int, int]]:
    """Cut 0 .. size into at most `count` ranges of about the same size.

    >>> even_ranges(10, 3)
    [(0, 3), (3, 6), (6, 10)]
    """
    count = max(1, min(count, size))
    return list(pairwise(size * number // count for number in range(count + 1)))
