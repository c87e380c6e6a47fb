"""Asynchronous label count of a batch: started before the forward, read without a device sync.

    forward starts ─▶ count on the device ─▶ copy to the host ─ ─ ─ ─ ┐
         └─▶ layers ─▶ ... ─▶ layers ─▶ loss: the count has arrived ◀─┘

The host runs ahead of the device. If the count were requested at the loss, the device would idle
until the answer is back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...packing import IGNORE_INDEX


class AsyncLabelCount:
    """Start counting at once; read the result later."""

    def __init__(self, targets: Tensor):
        self._count = (targets != IGNORE_INDEX).sum()
        self._copied: torch.cuda.Event | None = None
        if targets.is_cuda:
            on_host = torch.empty((), dtype=self._count.dtype, device="cpu", pin_memory=True)
            self._count = on_host.copy_(self._count, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(targets.device))

    def read(self) -> int:
        """Return the count; waits until the device has reached this batch.

        >>> AsyncLabelCount(torch.tensor([[5, IGNORE_INDEX, 7]])).read()
        2
        """
        if self._copied is not None:
            self._copied.synchronize()
        return int(self._count)


def count_labels(targets: Tensor) -> AsyncLabelCount | None:
    """Start counting; None while compiling or capturing, where no number can be read back."""
    if torch.compiler.is_compiling():
        return None
    if targets.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    return AsyncLabelCount(targets)
