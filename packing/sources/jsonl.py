"""JSON lines, plain or compressed (.gz, .zst).

A plain file is cut at bytes: a shard owns the lines that begin in its part, and seeks directly to
them. A compressed file has to be read from its beginning: a shard takes every S-th line. A file
has the length it had when it was opened: lines appended later belong to the next run.
"""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Iterator
from typing import Any, BinaryIO

from ..state.content_key import files_key
from .decompress import compressed_lines, decompressed_bytes, is_compressed
from .paths import DataFile, display_name, files_fingerprint
from .remote import RemoteFile
from .source import Row, RowSource, even_ranges

LINE_LIMIT = 64 << 20
DEPTH_LIMIT = 64
ONE_PER_LINE = "write one entry of the list per line"


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
                yield Row(_parse(line), location, [file, next_offset])
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
                yield Row(_parse(line), location, None)
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


def _parse(line: bytes | ValueError) -> Any:
    if isinstance(line, ValueError):
        return line
    try:
        # Some editors write a byte order mark; the utf-8-sig codec would cost 5 µs per line.
        row = _DECODER.decode(line.removeprefix(BOM_UTF8).decode("utf-8"))
    except RecursionError:
        return ValueError(f"JSON is nested deeper than {DEPTH_LIMIT}")
    except UnicodeDecodeError as error:
        return ValueError(f"the line is not UTF-8: {error.reason} at byte {error.start}")
    except ValueError as error:
        hint = f"; {ONE_PER_LINE}" if line.strip() == b"[" else ""
        return ValueError(f"not JSON: {error}{hint}")
    if isinstance(row, list) and row and isinstance(row[0], dict | str):
        return ValueError(f"the line is a list of {len(row)} entries; {ONE_PER_LINE}")
    if line.count(b"[") + line.count(b"{") > DEPTH_LIMIT and _depth(row) > DEPTH_LIMIT:
        return ValueError(f"JSON is nested deeper than {DEPTH_LIMIT}")
    return row


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict:
    row = dict(pairs)
    if len(row) < len(pairs):
        seen: set[str] = set()
        duplicate = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"the key {duplicate!r} appears twice")
    return row


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _depth(row: Any) -> int:
    """Count the levels of nested lists and dicts."""
    level, depth = [row], 0
    while containers := [value for value in level if isinstance(value, list | dict)]:
        level = [v for c in containers for v in (c.values() if isinstance(c, dict) else c)]
        depth += 1
    return depth


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_reject_constant)


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
