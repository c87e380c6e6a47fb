"""Stopping when asked: a signal on any rank stops all ranks after the same step.

    SIGTERM, SIGINT, SIGUSR1 ─▶ a flag ─▶ agreed by all ranks at the end of a step ─▶ save, leave
                 └─ a second one ─▶ a thread of its own ─▶ leave at once

Python hears a signal between two of its own instructions only, so a process that waits inside a
collective would be deaf to the second; the thread is told of it by the system itself.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any, ClassVar

import torch

from ..runtime import sum_over_ranks

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SAID = b"\nstopping after this step, with a checkpoint; a second signal leaves at once\n"
RELAYED = 0.5
"""Seconds in which a launcher passes on what the terminal has sent to its ranks as well."""


class StopRequest:
    """Listen for signals from now on; call `agreed` once a step, on every rank."""

    def __init__(self, said: bytes = SAID):
        """said: what the first signal is answered with."""
        self._said = said
        self.asked: signal.Signals | None = None
        self._asked_at = 0.0
        self._pending: torch.Tensor | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._second = _SecondSignal()
        self.listen()

    def listen(self) -> None:
        """Take the signals, again if somebody else has taken them since."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before.setdefault(number, signal.getsignal(number))
                signal.signal(number, self._hear)
            self._second.listen()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.asked is None:
            self.asked, self._asked_at = signal.Signals(number), time.monotonic()
            with suppress(OSError):  # who read it may be gone
                os.write(2, self._said)  # print may be under way in what was interrupted
        elif time.monotonic() - self._asked_at > RELAYED:
            os._exit(128 + number)

    def agreed(self) -> bool:
        """Say whether any rank was asked, the same on all.

        On an accelerator the answer is that of the step before: reading this one's would wait
        for the device.
        """
        total = sum_over_ranks(self.asked is not None)
        if total.device.type == "cpu":
            return bool(total)
        total, self._pending = self._pending, total
        return total is not None and bool(total)

    def release(self) -> None:
        """Give the signals back to whom they belonged, and forget what was asked."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        self._second.release()
        self.asked = self._pending = None


class _SecondSignal:
    """Leave at the second signal, whatever the main thread is waiting for."""

    pipes: ClassVar[set[int]] = set()
    """The ends that signals write to, of this process: its forks must not write to them."""

    def __init__(self):
        self._end: int | None = None
        self._before = -1

    def listen(self) -> None:
        if self._end is None:
            out, self._end = os.pipe()
            os.set_blocking(self._end, False)
            self.pipes.add(self._end)
            self._before = signal.set_wakeup_fd(self._end, warn_on_full_buffer=False)
            threading.Thread(target=self._watch, args=(out,), daemon=True).start()

    @staticmethod
    def _watch(out: int) -> None:
        first = None
        while number := os.read(out, 1):
            if number[0] in SIGNALS:
                first = first or time.monotonic()
                if time.monotonic() - first > RELAYED:
                    os._exit(128 + number[0])
        os.close(out)

    def release(self) -> None:
        if self._end is not None:
            now = signal.set_wakeup_fd(-1)
            signal.set_wakeup_fd(self._before if now == self._end else now)
            self.pipes.discard(self._end)
            os.close(self._end)
            self._end = None


def _leave_to_the_parent() -> None:
    """In a fork: what is sent to a data worker is not sent to its parent."""
    with suppress(ValueError):  # not the main thread
        before = signal.set_wakeup_fd(-1)
        if before not in _SecondSignal.pipes:
            signal.set_wakeup_fd(before)
    _SecondSignal.pipes.clear()


os.register_at_fork(after_in_child=_leave_to_the_parent)
