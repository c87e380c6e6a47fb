"""Small arrays between host and device: many in one copy, none that waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

_ALIGN = 16
_KINDS = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


class HostDeviceCopy:
    """Packs arrays into pinned memory and copies them in one go; on a CPU, nothing is copied."""

    def __init__(self, device: torch.device):
        self._device = device
        self._pinned = device.type == "cuda"

    def put(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """Bring arrays to the device."""
        if not self._pinned:
            return [torch.from_numpy(np.ascontiguousarray(a)) for a in arrays]
        packed, places = pack(arrays)
        return views(packed.to(self._device, non_blocking=True), arrays, places)

    def fetch(self, tensors: Sequence[Tensor]) -> Callable[[], list[np.ndarray]]:
        """Start the way back to the host; calling the result waits for it."""
        if not self._pinned:
            return lambda: [t.numpy() for t in tensors]
        held = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for host, t in zip(held, tensors, strict=True):
            host.copy_(t, non_blocking=True)
        done = torch.cuda.Event()
        done.record()

        def read() -> list[np.ndarray]:
            done.synchronize()
            return [t.numpy() for t in held]

        return read


def pack(arrays: Sequence[np.ndarray]) -> tuple[Tensor, list[int]]:
    """Lay arrays into one pinned buffer; say where each begins.

    Pinned memory comes from torch's caching allocator, which hands a block out again only when the
    copies that read it are done.
    """
    places, size = [], 0
    for a in arrays:
        places.append(size)
        size += -(-a.nbytes // _ALIGN) * _ALIGN
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    raw = packed.numpy()
    for a, place in zip(arrays, places, strict=True):
        raw[place : place + a.nbytes].view(a.dtype).reshape(a.shape)[...] = a
    return packed, places


def views(packed: Tensor, arrays: Sequence[np.ndarray], places: Sequence[int]) -> list[Tensor]:
    """The arrays' shapes and kinds over a packed buffer."""
    return [
        packed[place : place + a.nbytes].view(_KINDS[a.dtype]).view(a.shape)
        for a, place in zip(arrays, places, strict=True)
    ]
