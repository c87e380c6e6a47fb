"""`jit`: compile a function with numba, with an on-disk cache where one can be written.

Without a writable cache directory (a read-only installation without a home directory) every
process compiles the loops again, which takes seconds and changes nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def jit(function: Callable) -> Any:
    """Compile `function` with numba, without the GIL, cached on disk if possible."""
    try:
        return njit(cache=True, nogil=True)(function)
    except RuntimeError:  # numba found no writable cache directory
        return njit(nogil=True)(function)
