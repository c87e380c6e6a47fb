"""Graceful stop: a signal on any rank makes all ranks save and exit after the same step.

    SIGTERM, SIGINT, SIGUSR1 ─▶ flag ─▶ should_stop(), summed over ranks after a step ─▶ save, exit
                 └─ second signal ─▶ wake-up thread ─▶ exit at once

Python runs signal handlers between bytecodes, so a process blocked in a collective would miss the
second signal; the wake-up file descriptor reports it to a thread.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from functools import cache
from types import FrameType
from typing import Any

import torch

from ..runtime import sum_over_ranks

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
STOP_MESSAGE = b"\nstopping after this step, with a checkpoint; a second signal exits at once\n"
RELAY_SECONDS = 0.5
"""A launcher relays the terminal's signal to its ranks: within this time both count as one."""


class StopRequest:
    """Handle signals from now on; call `should_stop` after every step, on every rank."""

    def __init__(self, message: bytes = STOP_MESSAGE):
        """Install the handlers.

        Args:
            message: printed on the first signal.
        """
        self._message = message
        self.received: signal.Signals | None = None
        self._received_at = 0.0
        self._pending: torch.Tensor | None = None
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self._second_signal = _SecondSignal()
        self.listen()

    def listen(self) -> None:
        """Install the handlers, again if another library has replaced them since.

        A signal that another request has received in the meantime counts for this one too.
        """
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                handler = signal.getsignal(number)
                self._previous_handlers.setdefault(number, handler)
                signal.signal(number, self._on_signal)
                self._take_over(_request_of(handler))
            self._second_signal.listen()

    def _take_over(self, other: StopRequest | None) -> None:
        if other is not None and other.received is not None:
            self.received = self.received or other.received
            self._received_at = self._received_at or other._received_at

    def _previous_handler(self, number: signal.Signals) -> Any:
        """Return the previous handler of a signal."""
        handler = self._previous_handlers.get(number, signal.SIG_DFL)
        outer = _request_of(handler)
        return handler if outer is None else outer._previous_handler(number)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._received_at = signal.Signals(number), time.monotonic()
            with suppress(OSError):  # stderr may be closed
                os.write(2, self._message)  # the signal may have interrupted a print
        elif time.monotonic() - self._received_at > RELAY_SECONDS:
            os._exit(128 + number)

    def should_stop(self) -> bool:
        """Return whether any rank received a signal, the same on all ranks.

        On an accelerator the answer is that of the previous step: reading the current one would
        wait for the device.
        """
        total = sum_over_ranks(self.received is not None)
        if total.device.type == "cpu":
            return bool(total)
        total, self._pending = self._pending, total
        return total is not None and bool(total)

    def release(self) -> None:
        """Restore the previous handlers, and clear the request."""
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers.clear()
        self._second_signal.release()
        self.received = self._pending = None


class _SecondSignal:
    """Exit at the second signal, even if the main thread is blocked."""

    def __init__(self):
        self._write_fd: int | None = None
        self._previous_fd = -1

    def listen(self) -> None:
        if self._write_fd is None:
            _register_fork_hook()
            read_fd, self._write_fd = os.pipe()
            os.set_blocking(self._write_fd, False)
            _wakeup_fds.add(self._write_fd)
            self._previous_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
            threading.Thread(target=self._read_signals, args=(read_fd,), daemon=True).start()

    @staticmethod
    def _read_signals(read_fd: int) -> None:
        first = None
        while number := os.read(read_fd, 1):
            if number[0] in STOP_SIGNALS:
                first = first or time.monotonic()
                if time.monotonic() - first > RELAY_SECONDS:
                    os._exit(128 + number[0])
        os.close(read_fd)

    def release(self) -> None:
        if self._write_fd is not None:
            current = signal.set_wakeup_fd(-1)
            signal.set_wakeup_fd(self._previous_fd if current == self._write_fd else current)
            _wakeup_fds.discard(self._write_fd)
            os.close(self._write_fd)
            self._write_fd = None


_wakeup_fds: set[int] = set()
"""The wake-up file descriptors of this process: forks inherit them and must not write to them."""


@cache
def _register_fork_hook() -> None:
    os.register_at_fork(after_in_child=_detach_from_parent)


def _request_of(handler: Any) -> StopRequest | None:
    """Return the request that a signal's handler is a method of."""
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, StopRequest) else None


def _detach_from_parent() -> None:
    """In a fork: SIGTERM ends it, as pools expect; the other signals are for its parent.

    A signal to a data worker must not be reported to the parent either.
    """
    with suppress(ValueError):  # not the main thread
        inherited = signal.set_wakeup_fd(-1)
        if inherited not in _wakeup_fds:
            signal.set_wakeup_fd(inherited)
        for number in STOP_SIGNALS:
            request = _request_of(signal.getsignal(number))
            if request is not None:
                ends = number == signal.SIGTERM
                signal.signal(number, request._previous_handler(number) if ends else signal.SIG_IGN)
    _wakeup_fds.clear()
