"""Twins: subclasses of a model's own classes, of the same name, whose forward is fused.

A module becomes its twin by its class alone: weights, hooks and names stay, and the way back is
the class it had.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

FUSED = "_nopad_fused"
"""Marks a class or function that has fused kernels already; on a class, it is the one it was."""

Forward = Callable[..., Any]
"""Takes a module and its forward's arguments; None where they are not for the kernels."""


@cache
def fused_subclass(kind: type, fused: Forward) -> type:
    """A subclass of the same name whose forward is fused where it can be."""

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        out = fused(self, *args, **options)
        return kind.forward(self, *args, **options) if out is None else out

    def reduce(self: Any, protocol: Any) -> tuple:  # by name, a pickle would find the parent
        return _remade, (kind, fused), object.__reduce_ex__(self, protocol)[2]

    members = {"forward": forward, "__reduce_ex__": reduce, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), {**members, FUSED: kind})


def _remade(kind: type, fused: Forward) -> Any:
    twin: Any = fused_subclass(kind, fused)
    return object.__new__(twin)


def serves(x: Any) -> bool:
    """Whether the kernels are for this tensor, here: they are launched on the current device."""
    if not (isinstance(x, Tensor) and x.is_cuda) or torch.compiler.is_compiling():
        return False
    return x.get_device() == torch.cuda.current_device()


def has_no_hooks(part: nn.Module) -> bool:
    """Whether calling a module is its forward and nothing else: no hook has to run."""
    own = part._forward_hooks or part._forward_pre_hooks
    own = own or part._backward_hooks or part._backward_pre_hooks
    return not (own or _has_any_global_hook() or "forward" in vars(part))


def is_plain_linear(part: Any) -> bool:
    """No adapter, no quantized weight, no hook that has to run before a weight is there."""
    return type(part) is nn.Linear and has_no_hooks(part)
