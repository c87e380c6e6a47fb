"""Read compressed files (.gz, .zst) up to the last byte before a truncation or corruption."""

from __future__ import annotations

from io import BufferedReader, RawIOBase
from pathlib import Path

import pyarrow as pa

from .remote import RemoteFile, RemoteReadError

CODECS = {".gz": "gzip", ".zst": "zstd"}
CHUNK = 16 << 10
"""Bytes decompressed at a time; larger chunks are not faster."""


def open_compressed(path: Path | RemoteFile) -> BufferedReader:
    """Open a compressed file; a truncated file yields all intact bytes, then raises an OSError."""
    return BufferedReader(_DecompressedFile(path), CHUNK)


def decompressed_size(path: Path | RemoteFile, limit: int) -> int:
    """Return the bytes that come out of a file; beyond `limit`, the estimate of its first bytes."""
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
    def __init__(self, path: Path | RemoteFile):
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


def _open(path: Path | RemoteFile) -> pa.NativeFile:
    return pa.CompressedInputStream(_open_raw(path), CODECS[path.suffix])


def _open_raw(path: Path | RemoteFile) -> pa.NativeFile:
    if isinstance(path, RemoteFile):
        return pa.PythonFile(path.open(), "r")
    return pa.OSFile(str(path))
