"""Decorator for fused backwards: raises on a double backward and disables autocast."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def no_double_backward(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Raise on `create_graph=True`, and switch autocast off inside.

    A kernel has no second derivative; without this check it would be silently wrong. Under autocast
    some products of the backward would be cast, and those that accumulate in place would not.
    """

    @wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():  # inside a backward this means create_graph
            raise RuntimeError(
                "fused layers have no second derivatives (create_graph=True): "
                "call `undo` of what fuse_layers returned first"
            )
        device_type = next((grad.device.type for grad in grads if grad is not None), "cpu")
        if not torch.is_autocast_enabled(device_type):
            return backward(ctx, *grads)
        with torch.autocast(device_type, enabled=False):
            return backward(ctx, *grads)

    return run
