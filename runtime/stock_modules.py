"""Inspect Transformers modules: class before a swap, RMSNorm epsilon, globals a forward reads."""

from __future__ import annotations

from types import FunctionType
from typing import Any

STOCK_CLASS = "_nopad_stock_class"
"""Attribute of a subclass (trainer/layers): the class that the module had before."""


def stock_class(module: Any) -> type:
    """Return the class of a module, or the class it had before it was swapped for training."""
    return getattr(type(module), STOCK_CLASS, type(module))


def rms_norm_eps(module: Any) -> float | None:
    """Return the epsilon of an RMSNorm with a weight; None for any other module."""
    if not type(module).__name__.endswith("RMSNorm") or getattr(module, "weight", None) is None:
        return None
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def global_of(function: Any, name: str) -> Any:
    """Return the global `name` that a Python function reads; None if it reads no such global.

    >>> global_of(rms_norm_eps, "STOCK_CLASS"), global_of(stock_class, "STOCK_CLASS")
    (None, '_nopad_stock_class')
    """
    code = getattr(function, "__code__", None)
    return function.__globals__.get(name) if code is not None and name in code.co_names else None


def rebind_global(function: Any, name: str, value: Any) -> FunctionType:
    """Return a copy of a function that reads `value` where the original reads a global.

    The original, its file and every other function in it are unchanged. The copy keeps the other
    globals as they are now.

    >>> rebind_global(stock_class, "STOCK_CLASS", "__doc__")("") == str.__doc__
    True
    """
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, name: value},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    return copy
