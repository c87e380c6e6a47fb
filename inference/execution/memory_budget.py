"""Resolve the engine's `memory=` to bytes: a number, a fraction of what is free, or "spare"."""

from __future__ import annotations

import os
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any
from weakref import finalize

import torch

Memory = int | float | str

SPARE = "spare"
_CPU_DEFAULT = 1 << 30


def budget_bytes(memory: Memory, device: torch.device) -> int:
    """Turn `memory=` into bytes.

    memory: bytes; a fraction (0 < x <= 1) of the memory that is free now; or "spare", the memory
        that training leaves unused at its peak.
    """
    if isinstance(memory, str):
        return _spare_bytes(device)
    if isinstance(memory, float) and memory <= 1:
        return int(_free_bytes(device) * memory)
    return int(memory)


def check_memory(memory: Any) -> Memory:
    """Return a value that `budget_bytes` understands, or raise ValueError."""
    if isinstance(memory, str) and memory == SPARE:
        return memory
    is_number = isinstance(memory, Real) and not isinstance(memory, bool)
    if not is_number or not 0 < float(memory) < float("inf"):
        raise ValueError(
            f"memory is {memory!r}; pass bytes, a fraction of the free memory (0 < x <= 1), or "
            '"spare"'
        )
    return int(memory) if isinstance(memory, Integral) else float(memory)


def _spare_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return min(_CPU_DEFAULT, _free_bytes(device) // 4)
    needed = max(_training_peak(device), torch.cuda.memory_allocated(device))
    available = _free_bytes(device) + torch.cuda.memory_reserved(device) - needed
    # A tenth is left for the activations of the engine's forwards.
    return int(max(available, 0) * 0.9)


@dataclass
class _Usage:
    """What a device was used for until it was last looked at."""

    engines: int = 0
    """Bytes of the pages and states that engines hold now."""
    training: int = 0
    """The most that was reserved without them."""
    peak: int = 0
    """Torch's peak of reserved bytes, with them."""


_usage: dict[torch.device, _Usage] = {}
"""As process-wide as torch's peak, from which it takes the pages of engines."""


def _training_peak(device: torch.device) -> int:
    """Return the most that was reserved besides the pages of engines, as far as it is known."""
    usage = _usage.setdefault(device, _Usage())
    peak = torch.cuda.max_memory_reserved(device)
    # A peak as before is of another time, when engines may have held more.
    seen = peak if peak != usage.peak else torch.cuda.memory_reserved(device)
    usage.training, usage.peak = max(usage.training, seen - usage.engines), peak
    return usage.training


def count_engine_bytes(owner: Any, size: int, device: torch.device) -> None:
    """Count `size` bytes of pages and states as an engine's, until their owner is gone."""
    if device.type == "cuda":
        _usage.setdefault(device, _Usage()).engines += size
        finalize(owner, _discount_engine_bytes, size, device)


def _discount_engine_bytes(size: int, device: torch.device) -> None:
    _training_peak(device)  # while the peak is that of training beside these pages
    _usage[device].engines -= size


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not available on every system
        return 4 * _CPU_DEFAULT
