"""Read compressed files (.gz, .zst) up to the last byte before a truncation or damage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from io import BufferedReader, RawIOBase

import pyarrow as pa

from .paths import DataFile
from .remote import RemoteFile, RemoteReadError
from .source import SMALL_BYTES

CODECS = {".gz": "gzip", ".zst": "zstd"}
CHUNK = 16 << 10
"""Bytes decompressed at a time; larger chunks are not faster."""


def decompressed_bytes(paths: list[DataFile], sizes: list[int]) -> int:
    """Return the size of files when read; compressed ones are measured while all may be small."""
    pairs = list(zip(paths, sizes, strict=True))
    guess = sum(5 * size if is_compressed(path) else size for path, size in pairs)
    if guess > SMALL_BYTES:
        return guess
    total = sum(size for path, size in pairs if not is_compressed(path))
    for path in filter(is_compressed, paths):
        if total <= SMALL_BYTES:
            total += _decompressed_size(path, SMALL_BYTES - total)
    return total


def is_compressed(path: DataFile) -> bool:
    """Return whether a file is compressed, by its suffix."""
    return path.suffix in CODECS


def compressed_lines(
    path: DataFile, shard: int, shards: int, next_line: int | None, read_line: Callable
) -> Iterator[tuple[bytes | ValueError, object, int]]:
    """Yield every S-th line of a file, its location, and the next line of the shard.

    read_line: returns the next line of an open file, or the error in its place, and its size.
    """
    next_line, number, name = shard if next_line is None else next_line, 0, path.name
    if not path.stat().st_size:  # compressed data of no lines still has a header
        if next_line == shard == 0:
            yield ValueError("the compressed file has no bytes: it is truncated"), name, 1 << 62
        return
    with open_compressed(path) as file:
        while True:
            try:
                line, length = read_line(file)
            except RemoteReadError:
                raise
            except OSError as error:
                truncated = ValueError(f"the compressed data is truncated or corrupted: {error}")
                yield truncated, f"{name}, line {number + 1}", 1 << 62
                return
            if not length:
                return
            if number == next_line:
                next_line += shards
                if not isinstance(line, bytes) or line.strip():
                    yield line, f"{name}, line {number + 1}", next_line
            number += 1


def open_compressed(path: DataFile) -> BufferedReader:
    """Open a compressed file; a truncated file yields all intact bytes, then raises an OSError."""
    return BufferedReader(_DecompressedFile(path), CHUNK)


def _decompressed_size(path: DataFile, limit: int) -> int:
    """Return the decompressed size of a file; beyond `limit`, an estimate from its first bytes."""
    count, size = 0, path.stat().st_size
    with (
        _open_raw(path) as file,
        pa.CompressedInputStream(file, CODECS[path.suffix]) as stream,
    ):
        try:
            while piece := stream.read(CHUNK):
                count += len(piece)
                if count > limit:
                    return max(count, count * size // max(1, file.tell()))
        except RemoteReadError:
            raise
        except OSError:  # truncated: named when its rows are read
            pass
    return count


class _DecompressedFile(RawIOBase):
    def __init__(self, path: DataFile):
        self.path, self.num_read = path, 0
        self.error: OSError | None = None
        self.stream = _open(path)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        if self.error is not None:
            raise self.error
        try:
            count = self.stream.readinto(buffer)
        except RemoteReadError:
            raise
        except OSError as error:
            self.error = error
            count = self._read_before_error(buffer)
            if not count:
                raise
        self.num_read += count
        return count

    def _read_before_error(self, buffer) -> int:
        """Read the bytes that the failed call decompressed and discarded, byte by byte."""
        count = 0
        with _open(self.path) as stream:
            for begin in range(0, self.num_read, CHUNK):
                stream.read(min(CHUNK, self.num_read - begin))
            try:
                while count < len(buffer) and (byte := stream.read(1)):
                    buffer[count] = byte[0]
                    count += 1
            except OSError:
                pass
        return count

    def close(self) -> None:
        self.stream.close()
        super().close()


def _open(path: DataFile) -> pa.NativeFile:
    return pa.CompressedInputStream(_open_raw(path), CODECS[path.suffix])


def _open_raw(path: DataFile) -> pa.NativeFile:
    if isinstance(path, RemoteFile):
        return pa.PythonFile(path.open(), "r")
    return pa.OSFile(str(path))
