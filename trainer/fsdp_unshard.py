"""Gather the parameters of an FSDP2 model for an evaluation, or of its LM head for the loss.

Under FSDP2 each forward gathers parameters from all ranks, for every new token, and ranks that do
not step together deadlock. Gathered once, the model behaves like an unsharded one: every rank
generates independently, and the parameters are resharded at the end. If they do not fit, the model
stays sharded, and generation must step on all ranks together.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..runtime import fsdp_hook_ids, gather_objects


@contextmanager
def unsharded(model: nn.Module | None) -> Iterator[bool]:
    """Gather an FSDP2 model's parameters on all ranks, if they fit on every rank.

    Other models are not changed. Yield whether each rank can call the model on its own.
    """
    units = [] if model is None else [m for m in model.modules() if isinstance(m, FSDPModule)]
    fits = model is None or not units or all(gather_objects(_fits(model)))
    with ExitStack() as stack:
        for unit in units if fits else ():
            unit.unshard()
            stack.callback(unit.reshard)
            stack.enter_context(_without_fsdp_hooks(unit))
        yield fits


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters of an FSDP2 model.

    After a forward, FSDP2 keeps the parameters of the outermost module for a backward. An optimizer
    created at that point would get them, and never update the shards.
    """
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


@contextmanager
def unsharded_head(head: Any) -> Iterator[None]:
    """Gather an LM head that is a separate FSDP2 unit: the bypassed call has resharded it.

    FSDP then reduces the gradient over the ranks, and reshards the head after the backward.
    """
    is_resharded = isinstance(head, FSDPModule) and isinstance(head.weight, DTensor)
    if is_resharded:
        head.unshard()
    yield
    if is_resharded and not torch.is_grad_enabled():
        head.reshard()


def full_tensor(parameter: Any) -> Any:
    """Return a parameter that is sharded by tensor parallelism as a full tensor."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _fits(model: nn.Module) -> bool:
    """Whether this rank has memory for the full parameters and 10 % for the generation."""
    full = sum(p.numel() * p.element_size() for p in model.parameters())
    return 1.1 * full <= free_bytes(next(model.parameters()).device)


def free_bytes(device: torch.device) -> float:
    """Return the bytes that could be allocated; infinite for a CPU."""
    if device.type != "cuda":
        return float("inf")
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


@contextmanager
def _without_fsdp_hooks(unit: Any) -> Iterator[None]:
    """Remove FSDP's forward hooks, which would free the parameters after each forward."""
    ids = fsdp_hook_ids(unit)
    pre_hooks, hooks = unit._forward_pre_hooks, unit._forward_hooks
    unit._forward_pre_hooks = _without(pre_hooks, ids)
    unit._forward_hooks = _without(hooks, ids)
    try:
        yield
    finally:
        unit._forward_pre_hooks, unit._forward_hooks = pre_hooks, hooks


def _without(hooks: dict[int, Any], ids: set[int]) -> OrderedDict[int, Any]:
    return OrderedDict((hook_id, hook) for hook_id, hook in hooks.items() if hook_id not in ids)
