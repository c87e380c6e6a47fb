"""Row sources of Python objects: lists, iterables and functions; and of ready tokens, as rows.

A list has random access. An iterable or a function is read again for every shard and every
resume, so its rows must come in the same order each time; rows before the cursor are produced and
skipped. A state identifies it by its first row, so that a source that raised can be fixed and
continued; changes of later rows are not detected. An iterator can be read only once: it has one
shard, and to resume the caller passes a new iterator, whose first rows are skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

from ..state.fingerprint import Fingerprint
from .indexed_source import IndexedSource
from .remote import read_together
from .source import Row, RowSource
from .token_store import TokenArray, TokenStore


class ListSource(IndexedSource):
    """Rows of a list, or of any object with a length and rows by number."""

    def __init__(self, rows: Sequence[Any], name: str = "list"):
        self.list, self.name = rows, name

    def __len__(self) -> int:
        return len(self.list)

    def rows(self, numbers):
        return [row_or_error(self.list, number) for number in numbers.tolist()]

    def fingerprint(self):
        fingerprint = Fingerprint("list", len(self.list))
        for number in range(len(self.list)):
            row = row_or_error(self.list, number)  # raised again when the rows are read
            fingerprint.row(str(row) if isinstance(row, ValueError) else row)
        return fingerprint.text()


def row_or_error(rows: Any, number: int) -> Any:
    """Return a row by number, or the error that the user's code raised."""
    try:
        return rows[number]
    except Exception as error:
        return ValueError(f"{type(error).__name__}: {error}")


class TokenRowSource(IndexedSource):
    """Ready tokens as rows, for mixtures with streams."""

    def __init__(self, arrays: list[TokenArray], name: str):
        self.store, self.name = TokenStore(arrays), name

    def __len__(self) -> int:
        return len(self.store)

    def rows(self, numbers):
        read = read_together if self.store.is_remote else map
        return list(read(self._row, numbers.tolist()))

    def _row(self, number: int) -> dict:
        array, tokens = self.store.locate(number)
        row, labels = {"input_ids": array.flat[tokens]}, array.labels_of(tokens)
        return row if labels is None else row | {"labels": labels}

    def fingerprint(self):
        return self.store.fingerprint()


class IterableSource(RowSource):
    """Rows of an iterable, or of a function that returns an iterator, read as often as needed."""

    default_shards, sequential_only = 1, True

    def __init__(self, rows: Any, name: str = "iterable"):
        self.rows, self.name = rows, name
        self.single_use = isinstance(rows, Iterator)
        self._next_row = 0
        self._first: Row | None = None
        self._put_back: Iterator[Any] = iter(())
        """The first row, if `first` took it from an iterator and it was not read since."""

    def first(self):
        if self._first is None and (row := next(self.read(0, 1), None)):
            self._put_back, self._next_row = iter([row.value]), 0
        return self._first

    def read(self, shard, shards, cursor=None, shuffle_key=None):
        number = cursor[0] if cursor else shard
        rows = self._rows_from(number, shards)
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except Exception as error:  # add the location to any error of the user's code
                raise RuntimeError(f"{self.name}, row {number}: {error!r}") from error
            number += shards
            self._next_row = number
            read = Row(row, f"{self.name}, row {number - shards}", [number])
            if number == 1:
                self._first = read
            yield read

    def _rows_from(self, number: int, shards: int) -> Iterator[Any]:
        if not self.single_use:
            rows: Any = self.rows() if callable(self.rows) else self.rows
            if not isinstance(rows, Iterable):
                raise ValueError(
                    f"{self.name} returned {type(rows).__name__}: a function used as a source "
                    "must yield rows, or return an iterator of them"
                )
            return islice(rows, number, None, shards)
        if shards > 1 or number < self._next_row:
            raise ValueError(
                f"{self.name}: an iterator can be read only once, by one shard and for one epoch: "
                "pass a function that makes a new one"
            )
        return islice(chain(self._put_back, self.rows), number - self._next_row, None)

    def fingerprint(self):
        if self.single_use:
            return "iterator"
        try:
            first = next(self._rows_from(0, 1), None)
        except Exception:  # raised again with its location when the rows are read
            first = None
        return Fingerprint("rows").row(first).text()
