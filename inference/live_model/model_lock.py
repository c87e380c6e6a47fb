"""One lock per model: a model that one call has borrowed cannot be borrowed by another thread.

Borrowing changes the model itself (attention implementation, training flags), and several engines
may share it, so the lock belongs to the model and not to an engine. A thread that holds it may take
it again: a call between two events of a stream does not wait for itself. Threads get it in the
order in which they asked for it: one that runs step after step keeps nobody out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import wraps
from threading import Lock, get_ident
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar
from weakref import WeakKeyDictionary

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="HasLock")


class ModelLock:
    """A re-entrant lock that is handed over in the order of arrival."""

    def __init__(self) -> None:
        self.depth = 0
        """How many times its owner holds it."""
        self._owner: int | None = None
        self._queue: deque[tuple[int, Any]] = deque()
        """Threads that wait, each with a lock that is released when its turn comes."""
        self._state = Lock()

    @property
    def has_waiters(self) -> bool:
        """Whether another thread waits for it."""
        return bool(self._queue)

    @property
    def is_mine(self) -> bool:
        """Whether this thread holds it."""
        return self._owner == get_ident()

    def acquire(self, blocking: bool = True) -> bool:
        """Take the lock; False if it is another thread's and `blocking` is off."""
        thread, turn = get_ident(), Lock()
        with self._state:
            if self._owner in (None, thread):
                self._owner, self.depth = thread, self.depth + 1
                return True
            if not blocking:
                return False
            turn.acquire()
            self._queue.append((thread, turn))
        try:
            turn.acquire()
        except BaseException:  # an interrupt
            self._cancel(thread, turn)
            raise
        return True

    def release(self) -> None:
        """Give the lock back; the first thread that waits for it has it then."""
        with self._state:
            assert self._owner == get_ident(), "the lock is not this thread's"
            self.depth -= 1
            if self.depth:
                return
            self._owner = None
            if self._queue:
                self._owner, turn = self._queue.popleft()
                self.depth = 1
                turn.release()

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()

    def _cancel(self, thread: int, turn: Any) -> None:
        with self._state:
            if (thread, turn) in self._queue:
                self._queue.remove((thread, turn))
                return
        self.release()


class HasLock(Protocol):
    """An object that uses a model under the model's lock."""

    _lock: ModelLock


_locks: WeakKeyDictionary[Any, ModelLock] = WeakKeyDictionary()
"""Keyed by model, not stored on it: locks cannot be copied or pickled with a model."""
_creating = Lock()


def model_lock(model: Any) -> ModelLock:
    """Return the lock of a model, the same for every engine on it."""
    with _creating:
        return _locks.setdefault(model, ModelLock())


def exclusive(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make a method hold its object's `_lock` while it runs; other threads wait."""

    @wraps(method)
    def locked(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return method(self, *args, **kwargs)

    return locked
