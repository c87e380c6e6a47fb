"""Stopping when asked: a signal on any rank stops all ranks after the same step.

    SIGTERM, SIGINT, SIGUSR1 ─▶ a flag ─▶ agreed by all ranks at the end of a step ─▶ save, leave

A second signal leaves at once.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

import torch

from .ranks import sum_over_ranks

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SAID = b"\nstopping after this step, with a checkpoint; a second signal leaves at once\n"


class StopRequest:
    """Listen for signals from now on; call `agreed` once a step, on every rank."""

    def __init__(self):
        self.asked: signal.Signals | None = None
        self._pending: torch.Tensor | None = None
        self._before: dict[signal.Signals, Any] = {}
        self.listen()

    def listen(self) -> None:
        """Take the signals, again if somebody else has taken them since."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before.setdefault(number, signal.getsignal(number))
                signal.signal(number, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None:
            os._exit(128 + number)
        self.asked = signal.Signals(number)
        os.write(2, SAID)  # print may be under way in what was interrupted

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
        """Give the signals back to whom they belonged."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
