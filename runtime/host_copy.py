"""Copy tensors between host and device without blocking either.

`tensor.item()` and a plain `.to(device)` wait until the device has finished all queued work, so the
host, which should run ahead, has queued nothing afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """A copy of a tensor to the host that starts at once and is read later."""

    def __init__(self, tensor: Tensor):
        self._tensor = tensor.detach()
        self._copied: torch.cuda.Event | None = None
        if tensor.is_cuda:
            on_host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._tensor = on_host.copy_(self._tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> Tensor:
        """Return the tensor, on the host if the device was CUDA; wait only for this copy.

        >>> HostCopy(torch.tensor([2])).read().tolist()
        [2]
        """
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensor


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a host tensor to a device after the work queued there, without waiting for it.

    >>> to_device(torch.tensor([2]), "cpu").tolist()
    [2]
    """
    device = torch.device(device)
    if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=device.type == "cuda")  # the host must wait for its own
