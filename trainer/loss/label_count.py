"""How many labels of a batch count, asked of the GPU ahead of time, so that nobody waits for it.

    forward begins ─▶ count on the device ─▶ copied to the host ─ ─ ─ ─┐
         └─▶ layers ─▶ ... ─▶ layers ─▶ loss: the number is here ◀─ ─ ─┘

The host runs ahead of the device. Were the number asked for at the loss, the device would have
nothing to do while the answer comes back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...packing import IGNORE_INDEX


class AsyncLabelCount:
    """Ask at once, read later."""

    def __init__(self, targets: Tensor):
        self._number = (targets != IGNORE_INDEX).sum()
        self._arrived: torch.cuda.Event | None = None
        if targets.is_cuda:
            here = torch.empty((), dtype=self._number.dtype, device="cpu", pin_memory=True)
            self._number = here.copy_(self._number, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(targets.device))

    def read(self) -> int:
        """Return the number, once the device has begun with the batch.

        >>> AsyncLabelCount(torch.tensor([[5, IGNORE_INDEX, 7]])).read()
        2
        """
        if self._arrived is not None:
            self._arrived.synchronize()
        return int(self._number)


def ask(targets: Tensor) -> AsyncLabelCount | None:
    """Ask, unless this call is being traced or captured: there a number cannot come back."""
    if torch.compiler.is_compiling():
        return None
    if targets.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    return AsyncLabelCount(targets)
