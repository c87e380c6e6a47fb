"""Compile the inner loops, and keep the machine code on disk where that is possible.

A read-only installation without a writable home has nowhere to keep it: there the loops are
compiled again in every process, which costs seconds and changes nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def jit(function: Callable) -> Any:
    """Compile `function` with numba, without the GIL, cached on disk where it can be."""
    try:
        return njit(cache=True, nogil=True)(function)
    except RuntimeError:  # numba found no folder to keep the cache in
        return njit(nogil=True)(function)
