"""The whole parameters of a sharded model, for as long as an evaluation takes.

Under FSDP2 each forward gathers parameters from all ranks, for every new token, and ranks that do
not step together wait for each other for ever. Gathered once, the model is a plain one: ranks
generate on their own, and give the whole parameters back at the end. Where they do not fit, the
model stays as it is, and generation must step on all ranks together.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..runtime import gather_objects


@contextmanager
def unsharded(model: nn.Module | None) -> Iterator[None]:
    """Gather an FSDP2 model's parameters, all ranks together, if they fit on every one of them.

    Other models stay as they are.
    """
    parts = [] if model is None else [m for m in model.modules() if isinstance(m, FSDPModule)]
    if model is not None and parts and not all(gather_objects(_fit(model))):
        parts = []
    with ExitStack() as stack:
        for part in parts:
            part.unshard()
            stack.callback(part.reshard)
            stack.enter_context(_without_gathering(part))
        yield


def _fit(model: nn.Module) -> bool:
    """Whether this rank has room for the whole parameters, and a tenth more for what comes then."""
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    return 1.1 * whole <= room(next(model.parameters()).device)


def room(device: torch.device) -> float:
    """Bytes that could be allocated; a CPU's memory is taken to be enough."""
    if device.type != "cuda":
        return float("inf")
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + idle


@contextmanager
def _without_gathering(part: Any) -> Iterator[None]:
    """Take FSDP's hooks off a module: they would free the parameters after each forward."""
    state = part._get_fsdp_state()
    numbers = {state._pre_forward_hook_handle.id, state._post_forward_hook_handle.id}
    before, after = part._forward_pre_hooks, part._forward_hooks
    part._forward_pre_hooks = _all_but(before, numbers)
    part._forward_hooks = _all_but(after, numbers)
    try:
        yield
    finally:
        part._forward_pre_hooks, part._forward_hooks = before, after


def _all_but(hooks: dict[int, Any], numbers: set[int]) -> OrderedDict[int, Any]:
    return OrderedDict((number, hook) for number, hook in hooks.items() if number not in numbers)
