"""Whether two functions agree on a small input: in their outputs and in all gradients."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...runtime import preserve_rng, rng_states


def outputs_match(
    stock: Callable[..., Any], fused: Callable[..., Any], inputs: list[Tensor], weights: list[Any]
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
        fused_structure, actual = _outputs_and_grads(fused, inputs, weights)
        drew_numbers = not all(map(torch.equal, before, rng_states(device)))
        if fused_structure != structure or drew_numbers:
            return False
        pairs = zip(expected, actual, strict=True)
        errors = [((a - b).norm() / a.norm().clamp(min=1e-9)).item() for a, b in pairs]
    is_fp32 = inputs[0].dtype == torch.float32 and not torch.is_autocast_enabled(device.type)
    limit = 1e-3 if is_fp32 else 4e-2  # fp32 products may use TF32
    return all(error < limit for error in errors)  # unlike max, False where an error is NaN


def module_matches(module: Any, fused_class: Any, device: torch.device) -> bool:
    """Whether a module of one input computes the same with its fused class, on `device`."""
    return all(
        under_autocast(device, autocast, partial(_copy_matches, copy, fused_class, dtype))
        for copy in trial_copies(module, device)
        for autocast in trial_precisions(_first_weight(copy).dtype)
        # Under autocast inputs may have its dtype or that of the weights.
        for dtype in {_first_weight(copy).dtype, autocast or _first_weight(copy).dtype}
    )


def _copy_matches(module: Any, fused_class: Any, dtype: torch.dtype) -> bool:
    weight = _first_weight(module)
    x = trial_input(weight.detach().to(dtype), 1, 5, weight.shape[-1])
    stock, fused = (partial(cls.forward, module) for cls in (type(module), fused_class))
    return outputs_match(stock, fused, [x], list(module.parameters()))


def _first_weight(module: nn.Module) -> Tensor:
    return next(module.parameters())


def trial_precisions(dtype: torch.dtype) -> list[torch.dtype | None]:
    """Return the dtypes of autocast to try for weights of a dtype; None means no autocast.

    >>> trial_precisions(torch.bfloat16)  # autocast refuses to mix bf16 and fp16
    [None, torch.bfloat16]
    """
    halves = (torch.bfloat16, torch.float16)
    return [None, *(half for half in halves if dtype == half or dtype not in halves)]


def under_autocast(device: torch.device, dtype: torch.dtype | None, trial: Callable[[], bool]):
    """Return the verdict of a trial under autocast of a dtype."""
    with torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None):
        return trial()


def trial_copies(module: nn.Module, device: torch.device) -> list[Any]:
    """Return copies to try: one as it will train, in train mode, and one in fp32, held tighter."""
    if any(p.is_meta for p in module.parameters()):
        raise ValueError(f"{type(module).__name__} has no values yet (meta device)")
    is_sharded = any(hasattr(p, "full_tensor") for p in module.parameters())
    module = (_gathered_copy(module) if is_sharded else deepcopy(module)).to(device).train()
    for p in module.parameters():
        if not p.any():  # as of a new LoRA adapter: zeros would hide what depends on them
            with torch.no_grad():
                p.copy_(trial_input(p, *p.shape))
    if all(p.dtype == torch.float32 for p in module.parameters()):
        return [module]
    return [module, deepcopy(module).float()]


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
    is_sharded = hasattr(parameter, "full_tensor")
    whole = parameter.full_tensor() if is_sharded else parameter
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
