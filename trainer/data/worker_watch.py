"""Data workers that die: say which one, and what came from them last.

Torch notices a dead worker by SIGCHLD and raises wherever the training is at that moment, be it in
the middle of printing another error, or else by a connection that breaks; none of these errors
knows more than a process id. Here a death is told once, by name, when data is asked for.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class WorkerWatch:
    """Watch the workers of one iteration; ask for data inside `reading`."""

    def __init__(self, workers: Sequence[Any], last: Callable[[], object]):
        """last: what came from the workers last."""
        self.workers, self.last = workers, last
        self._reading = False
        self._death: RuntimeError | None = None
        self._before: Any = None

    def __enter__(self) -> WorkerWatch:
        if self.workers and _in_main_thread():
            self._before = signal.signal(signal.SIGCHLD, self._hear)
        return self

    def __exit__(self, *_: Any) -> None:
        if _in_main_thread is None:  # pyright: ignore[reportUnnecessaryComparison]
            return  # a loop that was left is ended with the interpreter: names are gone by then
        # After a death torch's handler would go on raising; it has nothing more to tell.
        if self._before is not None and self._death is None and _in_main_thread():
            signal.signal(signal.SIGCHLD, self._before)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Raise if a worker is dead, or dies meanwhile."""
        self._raise_if_dead()
        self._reading = True
        try:
            yield
        except (RuntimeError, OSError, EOFError) as error:
            self._reading = False
            _, in_a_row, reason = str(error).rpartition("RowError: ")
            if in_a_row:  # torch cannot rebuild an error of two parts and quotes its whole trace
                raise ValueError(reason.strip()) from None
            if self.workers:
                self._raise_if_dead(within=1.0)
            if self._death is not None:  # torch may have caught it, and told its own
                raise self._death from None
            raise
        finally:
            self._reading = False

    def _hear(self, number: int, frame: Any) -> None:
        if self._reading:
            self._raise_if_dead()

    def _raise_if_dead(self, within: float = 0.0) -> None:
        until = time.monotonic() + within
        while not (dead := [w for w in self.workers if w.exitcode]) and time.monotonic() < until:
            time.sleep(0.01)
        if not dead or self._death is not None:
            return
        self._reading = False
        names = ", ".join(f"{w.name} (pid {w.pid}, exit code {w.exitcode})" for w in dead)
        self._death = RuntimeError(
            f"data worker died: {names}; what came last from the workers was {self.last()}. "
            "Resume from the last checkpoint; fewer workers need less memory"
        )
        raise self._death


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
