"""Compare two functions on a small trial input: their outputs and all gradients."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...runtime import preserve_rng, rng_states
from ..fsdp_unshard import full_tensor


def outputs_match(
    stock: Callable[..., Any], other: Callable[..., Any], inputs: list[Tensor], weights: list[Any]
) -> bool:
    """Whether two functions have outputs of the same structure, and nearly the same gradients.

    A function that draws random numbers matches nothing, however small its dropout.

    >>> x = trial_input(torch.ones(1), 9)
    >>> outputs_match(torch.sin, lambda x: (x + 2 * math.pi).sin(), [x], [])
    True
    >>> outputs_match(torch.sin, torch.tanh, [x], [])
    False
    >>> outputs_match(torch.sin, lambda x: (x.sin(),), [x], [])
    False
    """
    device = inputs[0].device
    with torch.enable_grad(), preserve_rng(device):
        before = rng_states(device)
        structure, expected = _outputs_and_grads(stock, inputs, weights)
        other_structure, actual = _outputs_and_grads(other, inputs, weights)
        drew_numbers = not all(map(torch.equal, before, rng_states(device)))
        if other_structure != structure or drew_numbers:
            return False
        pairs = zip(expected, actual, strict=True)
        errors = [((a - b).norm() / a.norm().clamp(min=1e-9)).item() for a, b in pairs]
    # Products may use TF32. Unlike max, all is False where an error is NaN.
    return all(error < 1e-3 for error in errors)


def trial_copy(module: nn.Module, device: torch.device) -> Any:
    """Return a copy to try, in fp32 and train mode."""
    if any(p.is_meta for p in module.parameters()):
        raise ValueError(f"{type(module).__name__} has no values yet (meta device)")
    is_sharded = any(isinstance(p, DTensor) for p in module.parameters())
    copy = (_gathered_copy(module) if is_sharded else deepcopy(module)).to(device).float().train()
    for p in copy.parameters():
        if not p.any():  # as of a new LoRA adapter: zeros would hide what depends on them
            with torch.no_grad():
                p.copy_(trial_input(p, *p.shape))
    return copy


def _gathered_copy(module: Any) -> Any:
    """Return a module that FSDP2 has sharded as it was before sharding, with full weights.

    All ranks call it at the same time, since the weights are gathered.
    """
    from torch.distributed.fsdp import FSDPModule

    stock = next(c for c in type(module).__mro__ if not issubclass(c, FSDPModule))
    copy: Any = object.__new__(stock)
    vars(copy).update(vars(module))
    copy._buffers = dict(module._buffers)
    copy._parameters = {name: _gathered(p) for name, p in module._parameters.items()}
    children = module._modules.items()
    copy._modules = {n: None if child is None else _gathered_copy(child) for n, child in children}
    if isinstance(module, FSDPModule):  # its hooks gather the weights
        copy._forward_pre_hooks, copy._forward_hooks = OrderedDict(), OrderedDict()
    return copy


def _gathered(parameter: Any) -> nn.Parameter | None:
    if parameter is None:
        return None
    whole = full_tensor(parameter)
    return nn.Parameter(whole.detach().clone(), requires_grad=parameter.requires_grad)


def _outputs_and_grads(
    function: Callable[..., Any], inputs: list[Tensor], weights: list[Any]
) -> tuple[Any, list[Tensor]]:
    """Return the structure of the outputs, and the outputs with all gradients."""
    out = function(*inputs)
    outs = list(out) if isinstance(out, tuple) else [out]
    variables = [x for x in (*inputs, *weights) if x.requires_grad]
    d_outs = [trial_input(o, *o.shape).detach().mul(3).cos() for o in outs]  # unlike the inputs
    grads = torch.autograd.grad(outs, variables, d_outs)
    structure = type(out), [(o.dtype, o.shape) for o in outs]
    return structure, [tensor.detach().float() for tensor in (*outs, *grads)]


def trial_input(like: Tensor, *shape: int) -> Tensor:
    """Return varied values of the dtype and device of `like`, without drawing random numbers."""
    values = torch.linspace(-9, 9, math.prod(shape), device=like.device).sin()
    return values.view(shape).to(like.dtype).requires_grad_()
