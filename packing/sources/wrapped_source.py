"""`WrappedSource`: base class of a source that reads another one, such as all its rows but some."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .source import Row, RowSource


class WrappedSource(RowSource):
    """Answers everything as the wrapped source does; a subclass overrides what it changes."""

    def __init__(self, source: RowSource):
        self.source, self.name, self.paths = source, source.name, source.paths
        self.default_shards, self.num_bytes = source.default_shards, source.num_bytes
        self.shuffles_rows, self.sequential_only = source.shuffles_rows, source.sequential_only

    def read(self, shard, shards, cursor=None, shuffle_key=None) -> Iterator[Row]:
        return self.source.read(shard, shards, cursor, shuffle_key)

    def ranges(self, count: int) -> list[tuple[int, int]] | None:
        return self.source.ranges(count)

    def read_range(self, begin: int, end: int) -> Iterator[Row]:
        return self.source.read_range(begin, end)

    def num_rows(self) -> int | None:
        return self.source.num_rows()

    def row_bytes(self, row: Any) -> int:
        return self.source.row_bytes(row)

    def fingerprint(self) -> str:
        return self.source.fingerprint()

    def cache_key(self) -> str | None:
        return self.source.cache_key()

    def check_cursor(self, cursor: Any) -> None:
        self.source.check_cursor(cursor)
