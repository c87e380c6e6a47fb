"""How a fused operation is run backward: once, and as it was run forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def alone(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Keep out what autograd may bring along.

    A second derivative: a kernel has none, and without this it would be wrong.
    Autocast: some products inside would follow it, and those that add up in place would not.
    """

    @wraps(backward)
    def run(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():  # inside a backward: create_graph
            raise RuntimeError(
                "fused layers have no second derivatives (create_graph=True): "
                "call `undo` of what fuse_layers returned first"
            )
        kind = next((g.device.type for g in gradients if g is not None), "cpu")
        if not torch.is_autocast_enabled(kind):
            return backward(ctx, *gradients)
        with torch.autocast(kind, enabled=False):
            return backward(ctx, *gradients)

    return run
