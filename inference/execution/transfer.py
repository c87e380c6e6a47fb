"""Batched asynchronous host-device copies of small arrays through pinned memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

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
_NUM_SLOTS = 4
"""More than the steps that may be in flight."""


class HostDeviceCopy:
    """Copy several arrays at once through pinned memory; on a CPU nothing is copied."""

    def __init__(self, device: torch.device):
        self._device = device
        self._pinned = device.type == "cuda"

    def to_device(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """Copy arrays to the device."""
        if not self._pinned:
            return [torch.from_numpy(np.ascontiguousarray(a)) for a in arrays]
        packed, offsets = pack_arrays(arrays, pinned=True)
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


class StepBuffers:
    """Pinned memory of the steps in flight: inputs that a kernel reads, tokens that one writes.

    Between two steps the copies of the copy engine take 14 us on an H200, those of kernels 6. But
    torch takes pinned memory back without waiting for kernels: these buffers are kept, and used
    again once their step is done.
    """

    def __init__(self, device: torch.device, max_num_tokens: int):
        """Set up buffers for `max_num_tokens` tokens a step."""
        self._is_cuda = device.type == "cuda"
        self.tokens = torch.zeros(
            _NUM_SLOTS, max_num_tokens, dtype=torch.int64, pin_memory=self._is_cuda
        )
        self._inputs = [torch.empty(0, dtype=torch.uint8)] * _NUM_SLOTS
        self._done = [torch.cuda.Event() for _ in range(_NUM_SLOTS)] if self._is_cuda else []
        self._num_steps = 0
        finalizer = weakref.finalize(self, _wait_before_reuse, self._done)
        finalizer.atexit = False

    def next_slot(self) -> int:
        """Begin a step: return its slot, once the step that had it before is done."""
        slot = self._num_steps % _NUM_SLOTS
        self._num_steps += 1
        _wait_for(self._done[slot : slot + 1])
        return slot

    def pack(self, slot: int, arrays: Sequence[np.ndarray]) -> Tensor:
        """Copy the arrays of a step into its slot."""
        offsets, num_bytes = _layout(arrays)
        if len(self._inputs[slot]) < num_bytes:
            self._inputs[slot] = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._is_cuda)
        packed = self._inputs[slot][:num_bytes]
        _pack_into(packed, arrays, offsets)
        return packed

    def launched(self, slot: int) -> Callable[[int], np.ndarray]:
        """Note that the step is launched; the result waits for it and reads its first tokens."""
        if self._is_cuda:
            self._done[slot].record()
        number = self._num_steps

        def read(count: int) -> np.ndarray:
            assert self._num_steps < number + _NUM_SLOTS, "another step has the slot"
            _wait_for(self._done[slot : slot + 1])
            return self.tokens[slot, :count].numpy().copy()

        return read


def _wait_for(events: Sequence[torch.cuda.Event]) -> None:
    for event in events:
        event.synchronize()


def _wait_before_reuse(events: Sequence[torch.cuda.Event]) -> None:
    with suppress(RuntimeError):  # of CUDA, which was raised where it happened
        _wait_for(events)


def pack_arrays(arrays: Sequence[np.ndarray], pinned: bool) -> tuple[Tensor, list[int]]:
    """Copy arrays into one new buffer on the host; return it and the offset of each array.

    Pinned memory comes from torch's caching allocator, which reuses a block only after the copies
    that read it have finished.
    """
    offsets, num_bytes = _layout(arrays)
    packed = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
    _pack_into(packed, arrays, offsets)
    return packed, offsets


def _layout(arrays: Sequence[np.ndarray]) -> tuple[list[int], int]:
    """Return where arrays lie in a buffer, and the bytes that they take."""
    offsets, size = [], 0
    for a in arrays:
        offsets.append(size)
        size += -(-a.nbytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, size


def _pack_into(packed: Tensor, arrays: Sequence[np.ndarray], offsets: Sequence[int]) -> None:
    raw = packed.numpy().data
    for a, offset in zip(arrays, offsets, strict=True):
        if a.size:  # an empty array has no bytes to cast to
            raw[offset : offset + a.nbytes] = np.ascontiguousarray(a).data.cast("B")


def unpack_views(
    packed: Tensor, arrays: Sequence[np.ndarray], offsets: Sequence[int]
) -> list[Tensor]:
    """Return views into a packed buffer, with the arrays' shapes and dtypes."""
    return [
        packed[offset : offset + a.nbytes].view(_DTYPES[a.dtype]).view(a.shape)
        for a, offset in zip(arrays, offsets, strict=True)
    ]
