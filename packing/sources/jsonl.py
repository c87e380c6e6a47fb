"""`JsonlSource`: rows of JSON Lines files, plain or compressed (.gz, .zst).

A plain file is cut at bytes: a shard owns the lines that begin in its part, and seeks directly to
them. A compressed file has to be read from its beginning: a shard takes every S-th line. A file
has the length it had when it was opened: lines appended later belong to the next run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

from ..state.content_key import files_key
from .decompress import compressed_lines, decompressed_bytes, is_compressed
from .json_row import parse_row
from .paths import DataFile, display_name, files_fingerprint
from .remote import RemoteFile
from .source import Row, RowSource, even_ranges

LINE_LIMIT = 64 << 20


class JsonlSource(RowSource):
    """Rows of one or several jsonl files."""

    def __init__(self, paths: list[DataFile]):
        self.paths, self.name = paths, display_name(paths)
        self.sizes = [path.stat().st_size for path in paths]
        self.num_bytes = decompressed_bytes(paths, self.sizes)
        self.sequential_only = any(map(is_compressed, paths))

    def read(self, shard, shards, cursor=None, shuffle_key=None):
        first_file, offset = cursor or (0, None)
        for file, path in enumerate(self.paths[first_file:], first_file):
            if is_compressed(path):
                lines = compressed_lines(path, shard, shards, offset, _bounded_line)
            else:
                size = self.sizes[file]
                part = size * shard // shards, size * (shard + 1) // shards
                lines = _plain_lines(path, size, *part, offset)
            for line, location, next_offset in lines:
                yield Row(parse_row(line), location, [file, next_offset])
            offset = None

    def ranges(self, count):
        """Cut the bytes of all files; a compressed file belongs to the range of its first byte."""
        if self.sequential_only and len(self.paths) == 1:
            return None
        return even_ranges(sum(self._extents), count)

    def read_range(self, begin, end):
        start = 0
        for path, size, extent in zip(self.paths, self.sizes, self._extents, strict=True):
            first, last = max(0, begin - start), min(extent, end - start)
            lines = ()
            if is_compressed(path) and begin <= start < end:
                lines = compressed_lines(path, 0, 1, None, _bounded_line)
            elif first < last and not is_compressed(path):
                lines = _plain_lines(path, size, first, last, None)
            for line, location, _ in lines:
                yield Row(parse_row(line), location, None)
            start += extent

    @property
    def _extents(self) -> list[int]:
        """Bytes of each file; a compressed one without bytes is read too, and named."""
        pairs = zip(self.paths, self.sizes, strict=True)
        return [max(size, int(is_compressed(path))) for path, size in pairs]

    def fingerprint(self):
        return files_fingerprint("jsonl", self.paths, self.sizes)

    def cache_key(self):
        return files_key("jsonl", self.paths, self.sizes)


def _plain_lines(
    path: DataFile, size: int, begin: int, end: int, offset: int | None
) -> Iterator[tuple[bytes | ValueError, object, int]]:
    """Yield the lines that begin in a part of the file's `size` bytes."""
    with path.open("rb") as file:
        if offset is None:
            offset = _line_start(file, begin)
        file.seek(offset)
        while offset < end:
            line, length = _bounded_line(file)
            if not length:
                raise ValueError(
                    f"{path} ends before byte {offset}, it had {size} bytes when it was opened: do "
                    "not truncate a file while it is read; write a new file beside it"
                )
            start, offset = offset, offset + length
            if not isinstance(line, bytes) or line.strip():
                yield line, _LineLocation(path, start), offset


def _line_start(file: BinaryIO, begin: int) -> int:
    """Find the first line that does not begin before a byte."""
    if begin == 0:
        return 0
    file.seek(begin - 1)
    while piece := file.readline(1 << 20):
        if piece.endswith(b"\n"):
            break
    return file.tell()


def _bounded_line(file: Any) -> tuple[bytes | ValueError, int]:
    """Read a line and its size; a line over the limit is skipped without being stored."""
    line = file.readline(LINE_LIMIT + 1)
    if len(line) <= LINE_LIMIT:
        return line, len(line)
    length = len(line)
    while line and not line.endswith(b"\n"):
        line = file.readline(1 << 20)
        length += len(line)
    return ValueError(f"a line of {length} bytes, the limit is {LINE_LIMIT}"), length


class _LineLocation:
    """A byte of a file that computes its line number only when it is shown."""

    def __init__(self, path: DataFile, byte: int):
        self.path, self.byte = path, byte

    def __str__(self) -> str:
        if isinstance(self.path, RemoteFile):  # all before it would be downloaded to count lines
            return f"{self.path.name}, byte {self.byte}"
        line = 1
        with self.path.open("rb") as file:
            for begin in range(0, self.byte, 1 << 20):
                line += file.read(min(1 << 20, self.byte - begin)).count(b"\n")
        return f"{self.path.name}, line {line}"
