"""What the processes of a run tell each other: sums, objects, and nothing where there is one.

Every front end sits on torch.distributed, so one file serves them all.
"""

from __future__ import annotations

import gc
import os
from typing import Any

import torch
import torch.distributed as dist


def world() -> int:
    """Return the number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return which of them this is."""
    return dist.get_rank() if world() > 1 else 0


def sum_over_ranks(value: float) -> torch.Tensor:
    """Return the sum of every rank's value, on the device the processes talk through, unread."""
    device = "cuda" if world() > 1 and dist.get_backend() == "nccl" else "cpu"
    total = torch.tensor(float(value), dtype=torch.float64, device=device)
    if world() > 1:
        dist.all_reduce(total)
    return total


def gather_objects(value: Any) -> list[Any]:
    """Return every rank's value, in the order of ranks, on every rank."""
    if world() == 1:
        return [value]
    values: list[Any] = [None] * world()
    dist.all_gather_object(values, value)
    return values


def wait_for_all() -> None:
    """Return when every rank has come here."""
    if world() > 1:
        dist.barrier()


def join_group() -> None:
    """Let the processes of a launcher know each other, where a program has no trainer to do so."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")  # only answers travel, from host to host


def leave_group() -> None:
    """Part from the other processes, at the end of a program that is done with them.

    A process that ends inside its group is killed now and then: a thread of the group that lets go
    of a tensor wants an interpreter that is gone (pytorch/pytorch#179291). Whoever holds the group
    last waits for its threads, and DDP does so with the interpreter locked, which they may need:
    no wrapped model may be in reach when this is called.
    """
    if dist.is_available() and dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()
