"""Rows that are already Python objects: lists, iterables, and functions that make iterators.

A list is known by number. An iterable or a function is read again for every shard and every
resume, so its rows must come in the same order each time; rows before the cursor are made and
passed over. A state knows it by its first row, so that a source that raised can be mended and
continued: of other rows behind that one it notices nothing. An iterator can be read only once:
one shard, and a resume means that the caller hands in a fresh one, whose first rows are passed
over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from ..state.fingerprint import Fingerprint
from .source import Indexed, Row, RowSource


class Listed(Indexed):
    """Rows in a list, or in anything with a length that gives rows by number."""

    def __init__(self, rows: Sequence[Any], name: str = "list"):
        self.list, self.name = rows, name

    def __len__(self) -> int:
        return len(self.list)

    def rows(self, numbers):
        return [row_at(self.list, number) for number in numbers.tolist()]

    def fingerprint(self):
        mark = Fingerprint("list", len(self.list))
        for number in range(len(self.list)):
            mark.row(self.list[number])
        return mark.text()


def row_at(rows: Any, number: int) -> Any:
    """Give a row by number; whatever the user's code raises comes in its place."""
    try:
        return rows[number]
    except Exception as error:
        return ValueError(f"{type(error).__name__}: {error}")


class Iterated(RowSource):
    """Rows of an iterable, or of a function that returns an iterator, read as often as needed."""

    shards, reads_on = 1, True

    def __init__(self, make: Any, name: str = "iterable"):
        self.make, self.name = make, name
        self.once = isinstance(make, Iterator)
        self._at = 0

    def read(self, shard, shards, cursor=None, shuffle=None):
        number = cursor[0] if cursor else shard
        rows = self._rows_from(number, shards)
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except Exception as error:  # whatever the user's code raises, with its place
                raise RuntimeError(f"{self.name}, row {number}: {error!r}") from error
            number += shards
            self._at = number
            yield Row(row, f"{self.name}, row {number - shards}", [number])

    def _rows_from(self, number: int, shards: int) -> Iterator[Any]:
        if not self.once:
            rows: Any = self.make() if callable(self.make) else self.make
            if not isinstance(rows, Iterable):
                raise ValueError(
                    f"{self.name} returned {type(rows).__name__}: a function that is a source "
                    "yields rows, or returns an iterator of them"
                )
            return islice(rows, number, None, shards)
        if shards > 1 or number < self._at:
            raise ValueError(
                f"{self.name}: an iterator can be read only once, by one shard and for one epoch: "
                "pass a function that makes a new one"
            )
        return islice(self.make, number - self._at, None)

    def fingerprint(self):
        if self.once:
            return "iterator"
        try:
            first = next(self._rows_from(0, 1), None)
        except Exception:  # it will be raised with its place when the rows are read
            first = None
        return Fingerprint("rows").row(first).text()
