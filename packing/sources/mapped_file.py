"""Memory-mapped files of ready tokens, checked before every read.

A file that was truncated after it was opened ends the process with a bus error when the missing
pages are read.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np


class MappedFile(NamedTuple):
    """The identity of a mapped file; a file that was replaced or removed stays mapped as it was."""

    path: Path
    inode: int

    def check(self, num_bytes: int) -> None:
        """Raise if fewer bytes are left."""
        try:
            status = os.stat(self.path)
        except OSError:
            return
        if status.st_ino == self.inode and status.st_size < num_bytes:
            raise ValueError(
                f"{self.path.name} has {status.st_size} bytes, it had {num_bytes} when it was "
                "opened: do not truncate a file while it is read; write a new file beside it"
            )


def map_file(path: Path, dtype: np.dtype) -> tuple[np.ndarray, MappedFile]:
    """Map a file of tokens."""
    status = path.stat()
    if status.st_size % dtype.itemsize:
        raise ValueError(
            f"{path.name} has {status.st_size} bytes, not a multiple of {dtype} tokens: "
            "it is truncated"
        )
    values = np.asarray(np.memmap(path, dtype, "r")) if status.st_size else np.empty(0, dtype)
    return values, MappedFile(path.absolute(), status.st_ino)
