"""One lock per model: a model that one call has borrowed cannot be borrowed by another thread.

Borrowing changes the model itself (attention implementation, training flags), and several engines
may share it, so the lock belongs to the model and not to an engine. A thread that holds it may take
it again: a call between two events of a stream does not wait for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import Lock, RLock
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar
from weakref import WeakKeyDictionary

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="HasLock")


class HasLock(Protocol):
    """An object that uses a model under the model's lock."""

    _lock: Any


_locks: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Keyed by model, not stored on it: locks cannot be copied or pickled with a model."""
_creating = Lock()


def model_lock(model: Any) -> Any:
    """Return the lock of a model, the same for every engine on it."""
    with _creating:
        return _locks.setdefault(model, RLock())


def exclusive(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make a method hold its object's `_lock` while it runs; other threads wait."""

    @wraps(method)
    def locked(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return method(self, *args, **kwargs)

    return locked
