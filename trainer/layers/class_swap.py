"""Swap a module's class for a subclass of the same name with another forward.

Only the class of the module changes: weights, hooks and names stay, and restoring the previous
class undoes the swap. A subclass may have several forwards; each falls back to the one before it,
and the first to the stock forward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn

from ...runtime import STOCK_CLASS

FORWARDS = "_nopad_forwards"
"""Attribute of a subclass: its forwards, in the order in which they were added."""

Forward = Callable[..., Any]
"""Takes a module, the forward to fall back to, and that forward's arguments.

It returns None where it does not apply; the fallback is then called.
"""


def add_forward(cls: type, forward: Forward) -> type:
    """Return the subclass of a stock class, or of a swapped one, with one more forward."""
    stock: Any = getattr(cls, STOCK_CLASS, cls)
    return _subclass(stock, stock.forward, *added_forwards(cls), forward)


def remove_forwards(cls: type, forwards: list[Forward]) -> type:
    """Return the class without some of its added forwards; the stock class without any."""
    stock: Any = getattr(cls, STOCK_CLASS)
    kept = [forward for forward in added_forwards(cls) if forward not in forwards]
    return _subclass(stock, stock.forward, *kept) if kept else stock


def added_forwards(cls: type) -> tuple[Forward, ...]:
    """Return the forwards that were added to a class; none for a stock class."""
    return getattr(cls, FORWARDS, ())


@cache
def _subclass(stock: Any, own: Callable[..., Any], *forwards: Forward) -> type:
    with_fallbacks = own
    for added in forwards:
        with_fallbacks = _with_fallback(added, with_fallbacks)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_replaced = stock.forward is not own  # by a patch of the class
        return (stock.forward if is_replaced else with_fallbacks)(self, *args, **kwargs)

    def reduce(self: Any, protocol: Any) -> tuple:  # by name, pickle would find the stock class
        return _rebuild, (stock, forwards), object.__reduce_ex__(self, protocol)[2]

    members = {"forward": forward, "__reduce_ex__": reduce, "__module__": stock.__module__}
    members |= {STOCK_CLASS: stock, FORWARDS: forwards}
    return type(stock.__name__, (stock,), members)


def _with_fallback(added: Forward, fallback: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = added(self, fallback, *args, **kwargs)
        return fallback(self, *args, **kwargs) if out is None else out

    return forward


def _rebuild(stock: Any, forwards: tuple[Forward, ...]) -> Any:
    return object.__new__(_subclass(stock, stock.forward, *forwards))


class SwappedLayers:
    """The modules of a model whose class was swapped."""

    def __init__(self) -> None:
        self.names: list[str] = []
        """Their classes."""
        self._swaps: dict[int, tuple[nn.Module, list[Forward]]] = {}
        """By id: each module, and the forwards that were added."""

    def undo(self) -> None:
        """Take these forwards away again; call it before another wrapper changes the modules.

        Forwards that were added by others, before or after, stay.
        """
        for module, _ in self._swaps.values():
            if FORWARDS not in vars(type(module)):
                raise ValueError(
                    f"the class of a module is now {type(module)}, which nopad did not give it: "
                    "undo before fully_shard, or remove that wrapper first"
                )
        for module, forwards in self._swaps.values():
            module.__class__ = remove_forwards(type(module), forwards)
        self._swaps, self.names = {}, []

    def swap(self, module: nn.Module, forward: Forward) -> None:
        """Give a module the subclass of its class that tries a forward first."""
        module.__class__ = add_forward(type(module), forward)
        self._swaps.setdefault(id(module), (module, []))[1].append(forward)

    def add_name(self, name: str) -> None:
        if name not in self.names:
            self.names.append(name)
