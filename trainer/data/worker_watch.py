"""Report dead DataLoader workers: which one, and the last pack that came from the workers.

Torch detects a dead worker by SIGCHLD, and raises wherever the training is at that moment, even
while another error is printed, or by a broken connection; its errors name at most a process id.
Here, a dead worker raises one error with its name, when data is read.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class WorkerWatch:
    """Watch the workers of one iteration; read data inside `reading`."""

    def __init__(self, workers: Sequence[Any], last_pack: Callable[[], object]):
        """last_pack: returns the last pack that came from the workers, for the error."""
        self.workers, self.last_pack = workers, last_pack
        self._reading = False
        self._error: RuntimeError | None = None
        self._previous_handler: Any = None

    def __enter__(self) -> WorkerWatch:
        if self.workers and _in_main_thread():
            self._previous_handler = signal.signal(signal.SIGCHLD, self._on_sigchld)
        return self

    def __exit__(self, *_: Any) -> None:
        if _in_main_thread is None:  # pyright: ignore[reportUnnecessaryComparison]
            return  # at interpreter exit an unfinished loop is closed after module names are gone
        # After a death torch's handler would keep raising, with nothing new to report.
        if self._previous_handler is not None and self._error is None and _in_main_thread():
            signal.signal(signal.SIGCHLD, self._previous_handler)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Raise if a worker is dead or dies inside the block."""
        self._raise_if_dead()
        self._reading = True
        try:
            yield
        except (RuntimeError, OSError, EOFError) as error:
            self._reading = False
            _, is_row_error, reason = str(error).rpartition("RowError: ")
            if is_row_error:  # torch cannot rebuild it and quotes the worker's whole traceback
                raise ValueError(reason.strip()) from None
            if self.workers:
                self._raise_if_dead(within=1.0)
            if self._error is not None:  # torch may have caught ours and raised its own
                raise self._error from None
            raise
        finally:
            self._reading = False

    def _on_sigchld(self, number: int, frame: Any) -> None:
        if self._reading:
            self._raise_if_dead()

    def _raise_if_dead(self, within: float = 0.0) -> None:
        """Raise if a worker is dead, or dies within this many seconds."""
        until = time.monotonic() + within
        while not (dead := [w for w in self.workers if w.exitcode]) and time.monotonic() < until:
            time.sleep(0.01)
        if not dead or self._error is not None:
            return
        self._reading = False
        names = ", ".join(f"{w.name} (pid {w.pid}, exit code {w.exitcode})" for w in dead)
        self._error = RuntimeError(
            f"data worker died: {names}; the last pack from the workers was {self.last_pack()}. "
            "Resume from the last checkpoint; if memory ran out, use fewer workers"
        )
        raise self._error


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
