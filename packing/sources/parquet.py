"""Parquet files, memory-mapped; a shard reads only the row groups that contain its rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from .paths import display_name, files_fingerprint
from .source import Row, RowSource

GROUP_LIMIT = 4 << 30


class ParquetSource(RowSource):
    """Rows of one or several parquet files."""

    def __init__(self, paths: list[Path]):
        self.paths, self.name = paths, display_name(paths)
        self.num_bytes = 5 * sum(path.stat().st_size for path in paths)

    def read(self, shard, shards, cursor=None, shuffle_key=None):
        first_file, first_row = cursor or (0, 0)
        for file, path in enumerate(self.paths[first_file:], first_file):
            for value, row, next_row in _rows(path, shard, shards, first_row):
                yield Row(value, f"{path.name}, row {row}", [file, next_row])
            first_row = 0

    def fingerprint(self):
        return files_fingerprint("parquet", self.paths)


def _rows(path: Path, shard: int, shards: int, first_row: int) -> Iterator[tuple[Any, int, int]]:
    """Yield (row, its number, the number to continue at) of this shard's range of rows."""
    try:
        file = pq.ParquetFile(path, memory_map=True)
    except (pa.ArrowException, OSError) as error:
        yield ValueError(f"not an intact parquet file: {error}"), 0, 1 << 62
        return
    with file:
        total = file.metadata.num_rows
        begin, end = max(first_row, total * shard // shards), total * (shard + 1) // shards
        first = 0
        for group in range(file.metadata.num_row_groups):
            last = first + file.metadata.row_group(group).num_rows
            if begin < min(last, end):
                numbers = range(max(begin, first), min(last, end))
                yield from _row_group(file, group, first, numbers)
            first = last


def _row_group(file: pq.ParquetFile, group: int, first: int, numbers: range):
    size = file.metadata.row_group(group).total_byte_size
    try:
        if size > GROUP_LIMIT:
            raise OSError(f"a row group of {size} bytes, the limit is {GROUP_LIMIT}")
        table = file.read_row_group(group).slice(numbers.start - first, len(numbers))
        batches = ((row, table.slice(row, 256).to_pylist()) for row in range(0, len(numbers), 256))
        for begin, rows in batches:
            for number, row in enumerate(rows, numbers.start + begin):
                yield row, number, number + 1
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        message = f"row group {group} cannot be read: {error}"
        yield ValueError(message), numbers.start, numbers.stop
