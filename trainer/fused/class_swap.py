"""Swap a module's class for a subclass of the same name whose forward is fused.

Only the class of the module changes: weights, hooks and names stay, and restoring the previous
class undoes the swap. A subclass may have several fused forwards (rotary and QKV of an attention);
each falls back to the one before it, and the first to the stock forward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ...runtime import STOCK_CLASS, stock_class

FORWARDS = "_nopad_fused_forwards"
"""Attribute of a fused subclass: its fused forwards, in the order in which they were added."""

VERIFIED = "_nopad_verified_forward"
"""Attribute of a fused subclass: the stock forward that its own was verified against."""

SETTINGS = "_nopad_verified_settings"
"""Attribute of a fused module: its settings when its fused forward was verified."""

Forward = Callable[..., Any]
"""Takes a module, the forward to fall back to, and that forward's arguments.

It returns None where the kernels cannot run; the fallback is then called.
"""


def fused_subclass(stock: Any, *forwards: Forward) -> type:
    """Return a subclass of the same name that tries `forwards`, the last one first."""
    return _subclass(stock, stock.forward, *forwards)


@cache
def _subclass(stock: Any, verified: Callable[..., Any], *forwards: Forward) -> type:
    fused_forward = verified
    for fused in forwards:
        fused_forward = _with_fallback(fused, fused_forward)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_replaced = stock.forward is not verified  # by a patch of the class
        return (stock.forward if is_replaced else fused_forward)(self, *args, **kwargs)

    def reduce(self: Any, protocol: Any) -> tuple:  # by name, pickle would find the stock class
        return _rebuild, (stock, forwards), object.__reduce_ex__(self, protocol)[2]

    members = {"forward": forward, "__reduce_ex__": reduce, "__module__": stock.__module__}
    members |= {STOCK_CLASS: stock, FORWARDS: forwards, VERIFIED: verified}
    return type(stock.__name__, (stock,), members)


def add_forward(cls: type, fused: Forward) -> type:
    """Return the fused subclass of a class, or of a fused subclass, with one more fused forward."""
    return fused_subclass(getattr(cls, STOCK_CLASS, cls), *fused_forwards(cls), fused)


def fused_forwards(cls: type) -> tuple[Forward, ...]:
    """Return the fused forwards of a class; none for a stock class."""
    return getattr(cls, FORWARDS, ())


def _with_fallback(fused: Forward, fallback: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = fused(self, fallback, *args, **kwargs)
        return fallback(self, *args, **kwargs) if out is None else out

    return forward


def _rebuild(stock: type, forwards: tuple[Forward, ...]) -> Any:
    return object.__new__(fused_subclass(stock, *forwards))


def can_run(x: Any) -> bool:
    """Whether the kernels can run on a tensor: they are launched on the current device.

    A compiled layer does not use them: torch.compile generates its own.
    """
    if not (isinstance(x, Tensor) and x.is_cuda) or torch.compiler.is_compiling():
        return False
    return x.get_device() == torch.cuda.current_device()


def settings(module: nn.Module) -> dict[str, Any]:
    """Return the plain values among a module's attributes, which its stock forward may read."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str | tuple | None)
        and not (name.startswith("_") or name in ("training", "gradient_checkpointing"))
    }


def is_as_verified(module: nn.Module) -> bool:
    """Whether a module has the forward and settings that its fused forward was verified with."""
    verified = getattr(type(module), VERIFIED, None)
    if verified is None:  # a stock module, which is being verified
        return True
    stock: Any = stock_class(module)
    return stock.forward is verified and vars(module).get(SETTINGS) == settings(module)


def has_no_hooks(module: nn.Module) -> bool:
    """Whether calling a module only calls its class's forward: no hook, no replaced forward."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    hooks = hooks or module._backward_hooks or module._backward_pre_hooks
    return not (hooks or _has_any_global_hook() or "forward" in vars(module))


def is_plain_linear(module: Any) -> bool:
    """Whether a module is an `nn.Linear` without adapter, quantized weight or hooks."""
    return type(module) is nn.Linear and has_no_hooks(module)


class FusedLayers:
    """The modules of a model whose class was swapped, by `fuse_layers` or `compile_layers`."""

    def __init__(self) -> None:
        self.names: list[str] = []
        """The classes and functions that have fused kernels now."""
        self._swaps: dict[int, tuple[nn.Module, type, type]] = {}
        """By id: each module, the class it had before and its fused class."""

    def undo(self) -> None:
        """Restore the class of every module; call it before another wrapper changes the module."""
        for module, _, fused in self._swaps.values():
            if type(module) is not fused:
                raise ValueError(
                    f"the class of a {fused.__name__} is now {type(module)}, not the one that "
                    "fuse_layers gave it: undo before fully_shard, or remove that wrapper first"
                )
        for module, stock, _ in self._swaps.values():
            module.__class__ = stock
            vars(module).pop(SETTINGS, None)
        self._swaps, self.names = {}, []

    def swap(self, module: nn.Module, fused: type) -> None:
        _, stock, _ = self._swaps.get(id(module), (None, type(module), None))
        self._swaps[id(module)] = module, stock, fused
        module.__class__ = fused
        vars(module)[SETTINGS] = settings(module)

    def add_name(self, name: str) -> None:
        if name not in self.names:
            self.names.append(name)
