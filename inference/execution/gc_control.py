"""Python's collections of garbage, put off to where they do no harm.

A full one looks at every object there is: a third of a second with Transformers loaded, in which no
step is launched. Any of them may meet graphs nobody needs any more, and giving those back breaks a
capture that is under way.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock

_NEVER = (1 << 31) - 1


def _while_any_is_inside(change: Callable[[], Callable[[], None]]):
    """A block that the first to enter changes something for, and the last to leave undoes.

    The collector is the process's: engines in several threads must not restore one another's
    settings.
    """
    lock, inside, undo = Lock(), 0, None

    @contextmanager
    def block() -> Iterator[None]:
        nonlocal inside, undo
        with lock:
            undo = undo or change()
            inside += 1
        try:
            yield
        finally:
            with lock:
                inside -= 1
                if not inside:
                    undo = undo()

    return block


def _put_off_full() -> Callable[[], None]:
    young, middle, full = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)
    return lambda: gc.set_threshold(young, middle, full)


def _put_off_all() -> Callable[[], None]:
    back = gc.enable if gc.isenabled() else lambda: None
    gc.disable()
    return back


_full, _all = _while_any_is_inside(_put_off_full), _while_any_is_inside(_put_off_all)


def defer_full_gc() -> AbstractContextManager[None]:
    """Have full collections wait until the block is left; those of young objects go on."""
    return _full()


def gc_disabled() -> AbstractContextManager[None]:
    """Have no collection at all inside the block."""
    return _all()
