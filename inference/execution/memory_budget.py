"""How much memory the engine may take, and how many pages that is."""

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

    Bytes as they are; a share (0 < x <= 1) of what is free now; or "spare": what training leaves
    at its peak.
    """
    if isinstance(memory, str):
        return _spare(device)
    if isinstance(memory, float) and memory <= 1:
        return int(_free(device) * memory)
    return int(memory)


def check_memory(memory: Any) -> Memory:
    """Take what `budget_bytes` understands."""
    if isinstance(memory, str) and memory == SPARE:
        return memory
    number = isinstance(memory, Real) and not isinstance(memory, bool)
    if not number or not 0 < float(memory) < float("inf"):
        raise ValueError(
            f'memory is {memory!r}; give bytes, a share above 0 of what is free, or "spare"'
        )
    return int(memory) if isinstance(memory, Integral) else float(memory)


def _spare(device: torch.device) -> int:
    if device.type != "cuda":
        return min(_CPU_DEFAULT, _free(device) // 4)
    held = torch.cuda.memory_reserved(device)
    # What engines took before is part of the peak, but training does not need it.
    peak = max(torch.cuda.max_memory_reserved(device) - _taken.get(device, 0), 0)
    # A tenth stays for what forwards allocate beside the pages.
    return int(max(_free(device) + held - max(peak, torch.cuda.memory_allocated(device)), 0) * 0.9)


_taken: dict[torch.device, int] = {}


def record_engine_bytes(size: int, device: torch.device) -> None:
    """Remember how much engines took at most."""
    _taken[device] = max(_taken.get(device, 0), size)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device's memory is full, whichever library says it.

    >>> is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling ..."))
    True
    >>> is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    False
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    told = str(error)
    return isinstance(error, RuntimeError) and ("out of memory" in told or "ALLOC_FAILED" in told)


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not every system tells
        return 4 * _CPU_DEFAULT
