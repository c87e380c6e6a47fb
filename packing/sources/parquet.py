"""`ParquetSource`: rows of Parquet files; a shard is a range of rows, read a few rows at once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..state.content_key import files_key
from .null_fields import drop_null_fields
from .paths import DataFile, display_name, files_fingerprint
from .remote import RemoteFile, RemoteReadError
from .source import SMALL_BYTES, Row, RowSource, even_ranges

WIDTHS = {"INT32": 4, "INT64": 8, "FLOAT": 4, "DOUBLE": 8, "INT96": 12}
"""Bytes of a decoded value; others have at least one."""
BATCH_LIMIT = 4 << 30
"""Largest decoded size of a batch of rows, in bytes, or 16 times the encoded row group."""
COUNTED_FILES = 16
"""Files whose rows are counted for an estimate."""
ROWS_PER_BATCH = 16, 256


class ParquetSource(RowSource):
    """Rows of one or several parquet files."""

    def __init__(self, paths: list[DataFile]):
        self.paths, self.name = paths, display_name(paths)
        self.num_bytes = _decoded_bytes(paths)

    def read(self, shard, shards, cursor=None, shuffle_key=None):
        first_file, first_row = cursor or (0, 0)
        for file, path in enumerate(self.paths[first_file:], first_file):
            for value, row, next_row in _rows(path, shard, shards, first_row):
                yield Row(value, f"{path.name}, row {row}", [file, next_row])
            first_row = 0

    def ranges(self, count):
        return even_ranges(sum(self._row_counts), count)

    def read_range(self, begin, end):
        start = 0
        for path, count in zip(self.paths, self._row_counts, strict=True):
            first, last = max(0, begin - start), min(count, end - start)
            if first < last:
                for value, row, _ in _rows(path, 0, 1, first, last):
                    yield Row(value, f"{path.name}, row {row}", None)
            start += count

    @cached_property
    def _row_counts(self) -> list[int]:
        """Rows of each file; a file that cannot be opened is a row with the error."""
        return list(map(_count_rows, self.paths))

    def num_rows(self):
        """Count the rows of the first files, and extrapolate by bytes to the others."""
        sizes, first = [path.stat().st_size for path in self.paths], self.paths[:COUNTED_FILES]
        try:
            rows = 0
            for path in first:
                with _open(path) as file:
                    rows += file.metadata.num_rows
        except (pa.ArrowException, OSError, ValueError):  # named when its rows are read
            return None
        return round(rows * sum(sizes) / max(1, sum(sizes[: len(first)])))

    def fingerprint(self):
        return files_fingerprint("parquet", self.paths)

    def cache_key(self):
        return files_key("parquet", self.paths)


def _decoded_bytes(paths: list[DataFile]) -> int:
    """Return the size of the rows; files are measured as long as all may be small."""
    guess = 5 * sum(path.stat().st_size for path in paths)
    if guess > SMALL_BYTES:
        return guess
    total = 0
    for path in paths:
        try:
            with _open(path) as file:
                for group in range(file.metadata.num_row_groups):
                    for batch in _batches(file, group):
                        total += batch.nbytes
                        if total > SMALL_BYTES:
                            return total
        except RemoteReadError:
            raise
        except (pa.ArrowException, OSError, ValueError):  # named when its rows are read
            continue
    return total


def _rows(
    path: DataFile, shard: int, shards: int, first_row: int, end_row: int | None = None
) -> Iterator[tuple[Any, int, int]]:
    """Yield (row, its number, the number to continue at) of this shard's range of rows."""
    try:
        file = _open(path)
        _check_names(file.schema_arrow)
    except RemoteReadError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        yield ValueError(f"not an intact parquet file: {error}"), 0, 1 << 62
        return
    with file:
        total = file.metadata.num_rows
        begin, end = max(first_row, total * shard // shards), total * (shard + 1) // shards
        end = end if end_row is None else min(end, end_row)
        first = 0
        for group in range(file.metadata.num_row_groups):
            last = first + file.metadata.row_group(group).num_rows
            if begin < min(last, end):
                numbers = range(max(begin, first), min(last, end))
                yield from _row_group(file, group, first, numbers)
            first = last


def _count_rows(path: DataFile) -> int:
    try:
        with _open(path) as file:
            return file.metadata.num_rows
    except RemoteReadError:
        raise
    except (pa.ArrowException, OSError, ValueError):  # named when its rows are read
        return 1


def _open(path: DataFile) -> pq.ParquetFile:
    if isinstance(path, RemoteFile):
        return pq.ParquetFile(path.open())
    # Not memory-mapped: a file that is truncated while it is read would end the process.
    return pq.ParquetFile(path)


def _row_group(file: pq.ParquetFile, group: int, first: int, numbers: range):
    number = first
    try:
        for batch in _batches(file, group):
            begin, end = max(number, numbers.start), min(number + len(batch), numbers.stop)
            if begin < end:
                rows = batch.slice(begin - number, end - begin).to_pylist()
                for each, row in enumerate(rows, begin):
                    yield drop_null_fields(row), each, each + 1
            number += len(batch)
            if number >= numbers.stop:
                return
    except RemoteReadError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        message = f"row group {group} cannot be read: {error}"
        yield ValueError(message), max(number, numbers.start), numbers.stop


def _batches(file: pq.ParquetFile, group: int) -> Iterator[pa.RecordBatch]:
    """Decode a row group a few rows at a time: repeated values take no space before."""
    metadata = file.metadata.row_group(group)
    size, least = metadata.total_byte_size, ROWS_PER_BATCH[0]
    if size > BATCH_LIMIT:
        raise OSError(f"a row group of {size} bytes, the limit is {BATCH_LIMIT}")
    for number in range(metadata.num_columns):
        column = metadata.column(number)
        nested = file.schema.column(number).max_repetition_level > 0
        decoded = column.num_values * WIDTHS.get(column.physical_type, 1)
        if nested and decoded > max(BATCH_LIMIT, least * size):
            raise OSError(
                f"{column.path_in_schema} has {decoded} bytes in a row group of {size}, "
                f"the limit is {BATCH_LIMIT}"
            )
    # A value is at most as large as the row group, so this bounds a batch of flat columns.
    rows = min(max(BATCH_LIMIT // max(1, size), least), ROWS_PER_BATCH[1])
    return file.iter_batches(rows, row_groups=[group])


def _check_names(fields: Any) -> None:
    """Raise if two columns have the same name: a row could hold only the last of them."""
    names = [field.name for field in fields]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the column {twice!r} appears twice")
    for field in fields:
        inner = field.type
        while hasattr(inner, "value_type"):
            inner = inner.value_type
        if pa.types.is_struct(inner):
            _check_names(inner)
