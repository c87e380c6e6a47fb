"""Resolve the engine's `memory=` to bytes: a number, a fraction of what is free, or "spare"."""

from __future__ import annotations

import os
from numbers import Integral, Real
from typing import Any

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
    reserved = torch.cuda.memory_reserved(device)
    # The peak includes the pages of earlier engines, which training does not need.
    peak = max(torch.cuda.max_memory_reserved(device) - _engine_bytes.get(device, 0), 0)
    available = _free_bytes(device) + reserved - max(peak, torch.cuda.memory_allocated(device))
    # A tenth is left for the activations of the engine's forwards.
    return int(max(available, 0) * 0.9)


_engine_bytes: dict[torch.device, int] = {}
"""The most that one engine has allocated; as process-wide as torch's peak, which includes it."""


def record_engine_bytes(size: int, device: torch.device) -> None:
    """Record how much an engine has allocated on a device."""
    _engine_bytes[device] = max(_engine_bytes.get(device, 0), size)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not available on every system
        return 4 * _CPU_DEFAULT
