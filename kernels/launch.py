"""Launch helpers: SM count, PDL and Hopper, block size and warps of row-wise kernels."""

from __future__ import annotations

from functools import cache

import torch
import triton


@cache
def supports_pdl(device: torch.device) -> bool:
    """Whether a kernel may start before the previous one ends (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether a device has the tensor cores of Hopper: later ones are programmed differently."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@cache
def sm_count(device: torch.device) -> int:
    """Return the number of multiprocessors; a few on a CPU, where kernels are interpreted."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def row_block(width: int) -> tuple[int, int]:
    """Return the block size and the number of warps for a program that takes a row of `width`.

    >>> row_block(96), row_block(2048)
    ((128, 1), (2048, 4))
    """
    block = triton.next_power_of_2(width)
    return block, 1 if block <= 256 else 4 if block <= 2048 else 8
