"""The forward context: a step's `Varlen` for the layers of models that drop keyword arguments.

Most models pass unknown keyword arguments of their forward down to the attention function. A few
drop them on the way; their layers read the `Varlen` here (vLLM: forward_context.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..varlen import Varlen

_contexts: list[Varlen] = []
"""Innermost last. A list, not a ContextVar: torch.compile reads it, and so do the threads in which
a backward pass recomputes checkpointed layers."""


@contextmanager
def forward_context(varlen: Varlen) -> Iterator[None]:
    """Make a step's `Varlen` reach every attention layer called inside.

    >>> from torch import tensor
    >>> with forward_context(Varlen(tensor([0, 3]), 3)):
    ...     current_varlen().max_length
    3
    """
    _contexts.append(varlen)
    try:
        yield
    finally:
        _contexts.pop()


def current_varlen() -> Varlen | None:
    """Return the `Varlen` of the innermost `forward_context`, if there is one."""
    return _contexts[-1] if _contexts else None
