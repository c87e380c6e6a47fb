"""What a compressed file (.gz, .zst) unpacks to, up to the very byte where it is torn."""

from __future__ import annotations

from io import BufferedReader, RawIOBase
from pathlib import Path

import pyarrow as pa

KINDS = {".gz": "gzip", ".zst": "zstd"}
PIECE = 16 << 10
"""Bytes that are unpacked together; larger pieces are no faster."""


def unpacked(path: Path) -> BufferedReader:
    """Open a compressed file for reading; where it is torn, an OSError comes behind the rest."""
    return BufferedReader(_Unpacked(path), PIECE)


class _Unpacked(RawIOBase):
    def __init__(self, path: Path):
        self.path, self.given = path, 0
        self.torn: OSError | None = None
        self.stream = _open(path)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        if self.torn is not None:
            raise self.torn
        try:
            count = self.stream.readinto(buffer)
        except OSError as error:
            self.torn = error
            count = self._rest(buffer)
            if not count:
                raise
        self.given += count
        return count

    def _rest(self, buffer) -> int:
        """Read what the call that failed had unpacked and thrown away: anew, byte by byte."""
        count = 0
        with _open(self.path) as stream:
            for begin in range(0, self.given, PIECE):
                stream.read(min(PIECE, self.given - begin))
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


def _open(path: Path) -> pa.NativeFile:
    return pa.input_stream(str(path), compression=KINDS[path.suffix])
