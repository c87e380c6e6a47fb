"""Sharded models whose whole parameters do not fit: all ranks step together.

Under FSDP2 a forward gathers each layer's parameters from all ranks, so all of them must run it. A
rank that has nothing to run, or nothing any more, runs a forward of one token and throws it away:

    rank 0   step   step   step   step    ┐ a vote before each: who has a step of its own?
    rank 1   step   step   dummy  dummy   ┘ nobody: all are done

It costs a gathering of all parameters for every step; with room for them, gather them once instead.
A forward that fails half-way on one rank alone cannot be made up for: the others wait in it until
the process group's time limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from .borrow import borrow_model


def gathers_parameters(model: Any) -> bool:
    """Whether forwards of a model gather its parameters from other ranks."""
    parts: list[Any] = [m for m in model.modules() if isinstance(m, FSDPModule)]
    return any(_hook(part) in part._forward_pre_hooks for part in parts)


@contextmanager
def lockstep(model: Any) -> Iterator[None]:
    """Run forwards together with the other ranks; leave when none of them has any left."""
    device = next(model.parameters()).device

    def vote(*_: Any) -> None:  # what a hook returns would become the forward's arguments
        _vote(True, device)

    votes = model.register_forward_pre_hook(vote, prepend=True)
    try:
        yield
    finally:
        votes.remove()
        with borrow_model(model):
            while _vote(False, device):
                model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device))
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def _vote(busy: bool, device: torch.device) -> bool:
    """Tell whether this rank has a step to run; return whether any has."""
    votes = torch.tensor([int(busy)], device=device)
    dist.all_reduce(votes)
    return bool(votes.item())


def _hook(part: Any) -> int:
    return part._get_fsdp_state()._pre_forward_hook_handle.id
