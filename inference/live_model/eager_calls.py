"""Call a model's own forwards where torch.compile has put compiled code in their place.

Compiled code is specialized to the shapes of training, and would compile again for every step. The
engine has its own fused kernels and CUDA graphs, and must see each attention layer being called.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def eager_calls(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Bypass `module.compile()`, `torch.compile(module)` and compiled forwards inside."""
    before = [(a, name, a[name], eager) for a in map(vars, modules) for name, eager in _compiled(a)]
    try:
        for attributes, name, _, eager in before:
            attributes[name] = eager
        yield
    finally:
        for attributes, name, compiled, _ in before:
            attributes[name] = compiled


def _compiled(attributes: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names of a module's attributes that hold compiled code, and what to put there instead."""
    if attributes.get("_compiled_call_impl") is not None:
        yield "_compiled_call_impl", None
    forward = attributes.get("forward")
    if forward is not None and hasattr(forward, "_torchdynamo_orig_callable"):
        yield "forward", forward._torchdynamo_orig_callable
