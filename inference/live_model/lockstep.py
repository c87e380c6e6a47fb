"""`lockstep`: run FSDP2 forwards on all ranks together, a dummy one where a rank has no step.

An FSDP2 forward gathers each layer's parameters from all ranks, so all ranks must run it. A rank
without a step of its own runs a forward of one token and discards it:

    rank 0   step   step   step   step    ┐ before each forward, the ranks vote:
    rank 1   step   step   dummy  dummy   ┘ does any rank still have a step?

Every step gathers all parameters. If they fit into memory, gather them once before generating.
A forward that fails on one rank alone cannot be recovered: the others wait in it until the process
group's timeout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ...runtime import fsdp_hook_ids
from .borrow import borrow_model
from .weights_version import OWN_HOOK


def gathers_parameters(modules: Iterable[nn.Module]) -> bool:
    """Return whether forwards of a model's modules gather their parameters from other ranks."""
    sharded: list[Any] = [m for m in modules if isinstance(m, FSDPModule)]
    return any(fsdp_hook_ids(m) & set(m._forward_pre_hooks) for m in sharded)


@contextmanager
def lockstep(model: Any) -> Iterator[None]:
    """Run forwards together with the other ranks; leave once no rank has any left."""
    device = next(model.parameters()).device

    def vote(*_: Any) -> None:  # a hook's return value would replace the forward's arguments
        _any_rank_busy(True, device)

    setattr(vote, OWN_HOOK, True)
    hook = model.register_forward_pre_hook(vote, prepend=True)
    try:
        yield
    finally:
        hook.remove()
        with borrow_model(model):
            while _any_rank_busy(False, device):
                model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device))
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _any_rank_busy(busy: bool, device: torch.device) -> bool:
    """Tell the other ranks whether this one has a step to run; return whether any has."""
    votes = torch.tensor([int(busy)], device=device)
    dist.all_reduce(votes)
    return bool(votes.item())
