"""Batched asynchronous host-device copies of small arrays through pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16
_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


class HostDeviceCopy:
    """Copy several arrays at once through pinned memory; on a CPU nothing is copied."""

    def __init__(self, device: torch.device):
        self._device = device
        self._pinned = device.type == "cuda"

    def to_device(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """Copy arrays to the device."""
        if not self._pinned:
            return [torch.from_numpy(np.ascontiguousarray(a)) for a in arrays]
        packed, offsets = pack_arrays(arrays)
        return unpack_views(packed.to(self._device, non_blocking=True), arrays, offsets)

    def to_host(self, tensors: Sequence[Tensor]) -> Callable[[], list[np.ndarray]]:
        """Start a copy to the host; calling the result waits for it."""
        if not self._pinned:
            return lambda: [t.numpy() for t in tensors]
        buffers = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for buffer, t in zip(buffers, tensors, strict=True):
            buffer.copy_(t, non_blocking=True)
        done = torch.cuda.Event()
        done.record()

        def read() -> list[np.ndarray]:
            done.synchronize()
            return [buffer.numpy() for buffer in buffers]

        return read


def pack_arrays(arrays: Sequence[np.ndarray]) -> tuple[Tensor, list[int]]:
    """Copy arrays into one pinned buffer; return it and the offset of each array.

    Pinned memory comes from torch's caching allocator, which reuses a block only after the copies
    that read it have finished.
    """
    offsets, size = [], 0
    for a in arrays:
        offsets.append(size)
        size += -(-a.nbytes // _ALIGNMENT) * _ALIGNMENT
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    raw = packed.numpy().data
    for a, offset in zip(arrays, offsets, strict=True):
        if a.size:  # an empty array has no bytes to cast to
            raw[offset : offset + a.nbytes] = np.ascontiguousarray(a).data.cast("B")
    return packed, offsets


def unpack_views(
    packed: Tensor, arrays: Sequence[np.ndarray], offsets: Sequence[int]
) -> list[Tensor]:
    """Return views into a packed buffer, with the arrays' shapes and dtypes."""
    return [
        packed[offset : offset + a.nbytes].view(_DTYPES[a.dtype]).view(a.shape)
        for a, offset in zip(arrays, offsets, strict=True)
    ]
