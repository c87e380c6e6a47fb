"""Defer or disable Python garbage collection during steps and CUDA graph captures.

A full collection visits every object: a third of a second with Transformers loaded, in which no
step is launched. Any collection may free unused CUDA graphs, and that breaks a capture in progress.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock

_NEVER = (1 << 31) - 1


def _shared_block(change: Callable[[], Callable[[], None]]):
    """Make a block whose first entry applies a change and whose last exit undoes it.

    The collector belongs to the process: engines in several threads must not restore each other's
    settings.
    """
    lock, num_inside, undo = Lock(), 0, None

    @contextmanager
    def block() -> Iterator[None]:
        nonlocal num_inside, undo
        with lock:
            undo = undo or change()
            num_inside += 1
        try:
            yield
        finally:
            with lock:
                num_inside -= 1
                if not num_inside:
                    undo = undo()

    return block


def _stop_full() -> Callable[[], None]:
    young, middle, full = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)
    return lambda: gc.set_threshold(young, middle, full)


def _stop_all() -> Callable[[], None]:
    restore = gc.enable if gc.isenabled() else lambda: None
    gc.disable()
    return restore


_without_full, _without_any = _shared_block(_stop_full), _shared_block(_stop_all)


def defer_full_gc() -> AbstractContextManager[None]:
    """Defer full collections until the block ends; young generations are still collected."""
    return _without_full()


def gc_disabled() -> AbstractContextManager[None]:
    """Run no collection inside the block."""
    return _without_any()
