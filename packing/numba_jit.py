"""`jit`: compile a function with numba, with an on-disk cache where one can be written.

Without a writable cache directory (a read-only installation without a home directory) every
process compiles the loops again, which takes seconds and changes nothing else.

A process that compiles a function for others holds a lock beside its cache. The operating system
releases the lock when the process ends, even if it is killed.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numba import njit

LOCK = "compilation.lock"


def jit(function: Callable) -> Any:
    """Compile `function` with numba, without the GIL, cached on disk if possible."""
    try:
        return njit(cache=True, nogil=True)(function)
    except RuntimeError:  # numba found no writable cache directory
        return njit(nogil=True)(function)


def cache_folder(function: Any) -> Path | None:
    """Return the folder of a function's cache; None without one, or if numba is disabled."""
    stats = getattr(function, "stats", None)
    return Path(stats.cache_path) if stats and stats.cache_path else None


def is_cached(function: Any, folder: Path) -> bool:
    """Return whether a cache has a function that was compiled from the current source."""
    source = Path(inspect.getfile(function.py_func))
    version = f"py{sys.version_info.major}{sys.version_info.minor}"
    indexes = folder.glob(f"{source.stem}.{function.__name__}-*.{version}*.nbi")
    return any(index.stat().st_mtime >= source.stat().st_mtime for index in indexes)


@contextmanager
def cache_lock(folder: Path, shared: bool = False) -> Iterator[int]:
    """Hold the lock of a cache; yield its file descriptor, with which a child process keeps it.

    Raises OSError if another process has the lock, or on a file system without locks.
    """
    try:
        import fcntl
    except ImportError:
        raise OSError("Windows has no flock") from None
    with (folder / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_NB | (fcntl.LOCK_SH if shared else fcntl.LOCK_EX))
        yield file.fileno()


def is_being_compiled(function: Any) -> bool:
    """Return whether a process compiles a function for others."""
    folder = cache_folder(function)
    if folder is None or not (folder / LOCK).exists():
        return False
    try:
        with cache_lock(folder, shared=True):
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False
