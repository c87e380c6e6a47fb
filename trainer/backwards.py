"""How a fused operation is run backward: once, and as it was run forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def alone(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse a second derivative, which a kernel does not have: without this it would be wrong."""

    @wraps(backward)
    def run(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():  # inside a backward: create_graph
            raise RuntimeError(
                "fused layers have no second derivatives (create_graph=True): "
                "call `undo` of what fuse_layers returned first"
            )
        return backward(ctx, *gradients)

    return run
