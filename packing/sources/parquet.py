"""Parquet files, memory-mapped; a shard reads only the row groups that hold its rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from .paths import files_fingerprint, name_of
from .source import Row, RowSource

GROUP_LIMIT = 4 << 30


class Parquet(RowSource):
    """Rows of one or several parquet files."""

    def __init__(self, paths: list[Path]):
        self.paths, self.name = paths, name_of(paths)
        self.size = 5 * sum(path.stat().st_size for path in paths)

    def read(self, shard, shards, cursor=None, shuffle=None):
        number, at = cursor or (0, 0)
        for file, path in enumerate(self.paths[number:], number):
            for value, row, following in _rows(path, shard, shards, at):
                yield Row(value, f"{path.name}, row {row}", [file, following])
            at = 0

    def fingerprint(self):
        return files_fingerprint("parquet", self.paths)


def _rows(path: Path, shard: int, shards: int, at: int) -> Iterator[tuple[Any, int, int]]:
    """Give (row, its number, the number to continue at) of this shard's range of rows."""
    try:
        file = pq.ParquetFile(path, memory_map=True)
    except (pa.ArrowException, OSError) as error:
        yield ValueError(f"not a whole parquet file: {error}"), 0, 1 << 62
        return
    with file:
        total = file.metadata.num_rows
        begin, end = max(at, total * shard // shards), total * (shard + 1) // shards
        first = 0
        for group in range(file.metadata.num_row_groups):
            last = first + file.metadata.row_group(group).num_rows
            if begin < min(last, end):
                part = range(max(begin, first), min(last, end))
                yield from _group(file, group, first, part)
            first = last


def _group(file: pq.ParquetFile, group: int, first: int, part: range):
    size = file.metadata.row_group(group).total_byte_size
    try:
        if size > GROUP_LIMIT:
            raise OSError(f"a row group of {size} bytes, the limit is {GROUP_LIMIT}")
        table = file.read_row_group(group).slice(part.start - first, len(part))
        rows = ((row, table.slice(row, 256).to_pylist()) for row in range(0, len(part), 256))
        for begin, some in rows:
            for number, row in enumerate(some, part.start + begin):
                yield row, number, number + 1
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        yield ValueError(f"row group {group} cannot be read: {error}"), part.start, part.stop
