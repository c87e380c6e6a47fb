"""Copies of attention forwards that call the fused rotary embedding."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from ...runtime import global_of, rebind_global
from .class_swap import can_run
from .equivalence import outputs_match, trial_input

FUNCTION = "apply_rotary_pos_emb"


def rotary_function(forward: Any) -> Callable[..., Any] | None:
    """Return the `apply_rotary_pos_emb` that a forward calls; None if it calls none."""
    return global_of(forward, FUNCTION)


@cache
def with_fused_rotary(forward: Any) -> Callable[..., Any]:
    """Return a copy of a forward that calls the fused rotary embedding."""
    stock = rotary_function(forward)
    assert stock is not None
    return rebind_global(forward, FUNCTION, _fused_or(stock))


def has_globals_of(fused: Any, forward: Any) -> bool:
    """Whether a copy of a forward reads the globals of the forward as they are now."""
    then, now = fused.__globals__, forward.__globals__
    names = (name for name in forward.__code__.co_names if name != FUNCTION)
    is_stock = then[FUNCTION].__wrapped__ is now[FUNCTION]
    return is_stock and all(then.get(name) is now.get(name) for name in names)


def rotary_matches(stock: Any, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a model's function computes what the kernel computes, gradients included."""
    from .rotary import apply_rotary

    like = torch.empty(0, dtype=dtype, device=device)
    q, k = (trial_input(like, 1, 5, heads, 16).transpose(1, 2) for heads in (4, 2))
    angles = trial_input(like, 1, 5, 8).detach().float().repeat(1, 1, 2)
    angle_dtype = torch.float32 if torch.is_autocast_enabled(device.type) else dtype
    inputs = [q, k, angles.cos().to(angle_dtype), angles.sin().to(angle_dtype)]

    def rounded(*args: Tensor) -> tuple[Tensor, ...]:
        return tuple(out.to(dtype) for out in stock(*args))

    return outputs_match(rounded, apply_rotary, inputs, [])


def _fused_or(stock: Callable[..., Any]) -> Callable[..., Any]:
    from .rotary import apply_rotary

    @wraps(stock)
    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not (can_run(q) and is_supported(q, k, cos, sin)):
            return stock(q, k, cos, sin, *args, **kwargs)
        return apply_rotary(q, k, cos, sin)

    return apply


def is_supported(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether the kernel takes these: one row, full rotary dim, one dtype, constant angles.

    Under autocast angles are often fp32 and the stock results too, until attention casts them: the
    kernel computes in fp32 as well, and rounds at once.
    """
    if cos.requires_grad or sin.requires_grad:
        return False
    full_dim = cos.shape == sin.shape == (1, q.shape[2], q.shape[3]) and q.shape[0] == 1
    device = q.device.type
    is_cast = torch.is_autocast_enabled(device) and q.dtype == torch.get_autocast_dtype(device)
    one_dtype = q.dtype == k.dtype and (cos.dtype == q.dtype or is_cast)
    return full_dim and one_dtype and cos.is_contiguous() and sin.is_contiguous()
