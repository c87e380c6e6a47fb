"""Python's collections of garbage, put off to where they do no harm.

A full one looks at every object there is: a third of a second with Transformers loaded, in which no
step is launched. Any of them may meet graphs nobody needs any more, and giving those back breaks a
capture that is under way.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NEVER = (1 << 31) - 1


@contextmanager
def full_collections_later() -> Iterator[None]:
    """Have full collections wait until the block is left; those of young objects go on."""
    young, middle, full = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, full)


@contextmanager
def no_collections() -> Iterator[None]:
    """Have no collection at all inside the block."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
