"""JSON lines, plain or compressed (.gz, .zst).

A plain file is cut at bytes: a shard owns the lines that begin in its part, and seeks straight to
them. A compressed one has to be read from its beginning: a shard takes every S-th line. A file is
as long as it was when it was opened: lines that are appended belong to the next run.
"""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from .decompress import KINDS, unpacked
from .paths import files_fingerprint, name_of
from .source import Row, RowSource

LINE_LIMIT = 64 << 20
DEPTH_LIMIT = 64
ONE_LIST = "of one large list, write one entry a line"


class JsonLines(RowSource):
    """Rows of one or several jsonl files."""

    def __init__(self, paths: list[Path]):
        self.paths, self.name = paths, name_of(paths)
        self.sizes = [path.stat().st_size for path in paths]
        pairs = zip(paths, self.sizes, strict=True)
        self.size = sum(5 * size if _packed(path) else size for path, size in pairs)
        self.reads_on = any(map(_packed, paths))

    def read(self, shard, shards, cursor=None, shuffle=None):
        number, at = cursor or (0, None)
        for file, path in enumerate(self.paths[number:], number):
            if _packed(path):
                lines = _packed_lines(path, shard, shards, at)
            else:
                lines = _plain_lines(path, self.sizes[file], shard, shards, at)
            for line, where, following in lines:
                yield Row(_parsed(line), where, [file, following])
            at = None

    def fingerprint(self):
        return files_fingerprint("jsonl", self.paths, self.sizes)


def _packed(path: Path) -> bool:
    return path.suffix in KINDS


def _plain_lines(
    path: Path, size: int, shard: int, shards: int, at: int | None
) -> Iterator[tuple[bytes | ValueError, object, int]]:
    """Give the lines that begin in this shard's part of the bytes."""
    begin, end = size * shard // shards, size * (shard + 1) // shards
    with path.open("rb") as file:
        if at is None:
            at = _line_start(file, begin)
        file.seek(at)
        while at < end:
            line, taken = _bounded_line(file)
            if not taken:
                raise ValueError(
                    f"{path} has no byte {at} any more, it had {size} when it was opened: a file "
                    "must not be cut while it is read; write the new one beside it"
                )
            start, at = at, at + taken
            if not isinstance(line, bytes) or line.strip():
                yield line, _Place(path, start), at


def _line_start(file: BinaryIO, begin: int) -> int:
    """Find the first line that begins at or behind a byte."""
    if begin == 0:
        return 0
    file.seek(begin - 1)
    while piece := file.readline(1 << 20):
        if piece.endswith(b"\n"):
            break
    return file.tell()


def _packed_lines(
    path: Path, shard: int, shards: int, at: int | None
) -> Iterator[tuple[bytes | ValueError, object, int]]:
    """Decompress and give every S-th line."""
    at, number, name = shard if at is None else at, 0, path.name
    with unpacked(path) as file:
        while True:
            try:
                line, taken = _bounded_line(file)
            except OSError as error:
                torn = ValueError(f"the compressed data is torn: {error}")
                yield torn, f"{name}, line {number + 1}", 1 << 62
                return
            if not taken:
                return
            if number == at:
                at += shards
                if not isinstance(line, bytes) or line.strip():
                    yield line, f"{name}, line {number + 1}", at
            number += 1


def _bounded_line(file: Any) -> tuple[bytes | ValueError, int]:
    """Read a line and its size; one over the limit is passed over without keeping it."""
    line = file.readline(LINE_LIMIT + 1)
    if len(line) <= LINE_LIMIT:
        return line, len(line)
    taken = len(line)
    while line and not line.endswith(b"\n"):
        line = file.readline(1 << 20)
        taken += len(line)
    return ValueError(f"a line of {taken} bytes, the limit is {LINE_LIMIT}"), taken


def _parsed(line: bytes | ValueError) -> Any:
    if isinstance(line, ValueError):
        return line
    try:
        # Some editors begin files with a mark; the codec that knows it takes 5 µs more a line.
        row = _DECODER.decode(line.removeprefix(BOM_UTF8).decode("utf-8"))
    except RecursionError:
        return ValueError(f"JSON is nested deeper than {DEPTH_LIMIT}")
    except UnicodeDecodeError as error:
        return ValueError(f"the line is not UTF-8: {error.reason} at byte {error.start}")
    except ValueError as error:
        hint = f"; {ONE_LIST}" if line.strip() == b"[" else ""
        return ValueError(f"not JSON: {error}{hint}")
    if isinstance(row, list) and row and isinstance(row[0], dict | str):
        return ValueError(f"a list of {len(row)} entries on one line; {ONE_LIST}")
    if line.count(b"[") + line.count(b"{") > DEPTH_LIMIT and _depth(row) > DEPTH_LIMIT:
        return ValueError(f"JSON is nested deeper than {DEPTH_LIMIT}")
    return row


def _unique(pairs: list[tuple[str, Any]]) -> dict:
    row = dict(pairs)
    if len(row) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"the key {twice!r} stands twice")
    return row


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _depth(row: Any) -> int:
    """Count the lists and dicts that stand inside each other."""
    level, depth = [row], 0
    while boxes := [value for value in level if isinstance(value, list | dict)]:
        level = [v for box in boxes for v in (box.values() if isinstance(box, dict) else box)]
        depth += 1
    return depth


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)


class _Place:
    """A byte of a file, that finds out its line number only when somebody asks."""

    def __init__(self, path: Path, byte: int):
        self.path, self.byte = path, byte

    def __str__(self) -> str:
        line = 1
        with self.path.open("rb") as file:
            for begin in range(0, self.byte, 1 << 20):
                line += file.read(min(1 << 20, self.byte - begin)).count(b"\n")
        return f"{self.path.name}, line {line}"
