"""The rank and the world size of this process; join or leave the process group."""

from __future__ import annotations

import gc
import os

import torch.distributed as dist


def world_size() -> int:
    """Return the number of processes of the run; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return dist.get_rank() if world_size() > 1 else 0


def init_group() -> None:
    """Join the launcher's processes into a group, for programs in which no trainer does it."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")  # only Python objects are exchanged, between hosts


def destroy_group() -> None:
    """Leave the process group at the end of a program.

    A process that exits inside its group sometimes crashes, because a thread of the group releases
    a tensor after the interpreter has shut down (pytorch/pytorch#179291). Dropping the last
    reference to the group joins its threads, and DDP does so holding the GIL, which they may need:
    delete every wrapped model before calling this.
    """
    if dist.is_available() and dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()
