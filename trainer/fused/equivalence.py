"""Whether two ways to compute something agree: results and gradients, on a small input."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def agree(
    stock: Callable[..., Any], fused: Callable[..., Any], inputs: list[Tensor], weights: list[Any]
) -> bool:
    """Whether two functions have results of the same form, and nearly the same gradients.

    What draws random numbers agrees with nothing, however few it drops.

    >>> agree(torch.sin, lambda x: (x + 2 * math.pi).sin(), [wave(torch.ones(1), 9)], [])
    True
    >>> agree(torch.sin, torch.tanh, [wave(torch.ones(1), 9)], [])
    False
    >>> agree(torch.sin, lambda x: (x.sin(),), [wave(torch.ones(1), 9)], [])
    False
    """
    with torch.enable_grad(), _random_states(inputs[0].device) as untouched:
        form, gold = _outcome(stock, inputs, weights)
        other_form, ours = _outcome(fused, inputs, weights)
        if other_form != form or not untouched():
            return False
        pairs = zip(gold, ours, strict=True)
        errors = [((a - b).norm() / a.norm().clamp(min=1e-9)).item() for a, b in pairs]
    limit = 1e-3 if inputs[0].dtype == torch.float32 else 4e-2  # the products' may be TF32
    return all(error < limit for error in errors)  # unlike max, false where one is no number


def agrees(part: Any, twin: Any, device: torch.device) -> bool:
    """Run one module of a single input as it is and as its twin, where it will train."""
    return all(_agrees(copy, twin) for copy in copies(part, device))


def _agrees(part: Any, twin: Any) -> bool:
    weights = list(part.parameters())
    x = wave(weights[0], 1, 5, weights[0].shape[-1])
    return agree(partial(type(part).forward, part), partial(twin.forward, part), [x], weights)


def copies(part: nn.Module, device: torch.device) -> list[Any]:
    """What to try: as it will train, where it drops out; and in fp32, where little is forgiven."""
    if any(p.is_meta for p in part.parameters()):
        raise ValueError(f"{type(part).__name__} has no numbers yet")
    part = deepcopy(part).to(device).train()
    if all(p.dtype == torch.float32 for p in part.parameters()):
        return [part]
    return [part, deepcopy(part).float()]


@contextmanager
def _random_states(device: torch.device) -> Iterator[Callable[[], bool]]:
    """Leave random states as they are; tell whether they were asked."""

    def states() -> list[Tensor]:
        here = [torch.get_rng_state()]
        return [*here, torch.cuda.get_rng_state(device)] if device.type == "cuda" else here

    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        before = states()
        yield lambda: all(map(torch.equal, before, states()))


def _outcome(
    call: Callable[..., Any], inputs: list[Tensor], weights: list[Any]
) -> tuple[Any, list[Tensor]]:
    """What the results look like; the results and all gradients."""
    out = call(*inputs)
    outs = list(out) if isinstance(out, tuple) else [out]
    given = [x for x in (*inputs, *weights) if x.requires_grad]
    rises = [wave(o, *o.shape).detach().mul(3).cos() for o in outs]  # not along the inputs
    grads = torch.autograd.grad(outs, given, rises)
    form = type(out), [(o.dtype, o.shape) for o in outs]
    return form, [tensor.detach().float() for tensor in (*outs, *grads)]


def wave(like: Tensor, *shape: int) -> Tensor:
    """Numbers to try something with, without touching a random state."""
    numbers = torch.linspace(-9, 9, math.prod(shape), device=like.device).sin()
    return numbers.view(shape).to(like.dtype).requires_grad_()
