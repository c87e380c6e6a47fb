"""Hash all bytes of data, as the key of a cache; a fingerprint reads only pieces of large data."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

READ_BYTES = 1 << 20


def files_key(kind: str, paths: Sequence[Any], sizes: Sequence[int] = ()) -> str | None:
    """Hash files, their names included; None if one is not a file of this machine.

    sizes: number of bytes of each file to hash; default: all.
    """
    digest = hashlib.blake2b(kind.encode(), digest_size=16)
    for number, path in enumerate(paths):
        if not isinstance(path, Path) or not path.is_file():
            return None
        left = sizes[number] if sizes else path.stat().st_size
        digest.update(f"\n{path.name} {left}\n".encode())
        with path.open("rb") as file:
            while left > 0 and (piece := file.read(min(left, READ_BYTES))):
                digest.update(piece)
                left -= len(piece)
    return digest.hexdigest()


class HashedStream:
    """A file to write to that only hashes."""

    closed = False

    def __init__(self, kind: str):
        self._digest = hashlib.blake2b(kind.encode(), digest_size=16)

    def write(self, data: Any) -> int:
        self._digest.update(data)
        return len(data)

    def flush(self) -> None:
        return

    def hexdigest(self) -> str:
        return self._digest.hexdigest()
