"""The forward context: a step's `Varlen` for the layers of models that drop keyword arguments.

Most models pass unknown keyword arguments of their forward down to the attention function. A few
drop them on the way; their layers read the `Varlen` here (vLLM: forward_context.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..varlen import Varlen


class _Context:
    """A `Varlen`, and the configs of the model that it is for; None: of any model."""

    def __init__(self, varlen: Varlen, configs: frozenset[int] | None):
        self.varlen = varlen
        self.configs = configs

    def is_for(self, module: nn.Module | None) -> bool:
        config = getattr(module, "config", None)
        return self.configs is None or config is None or id(config) in self.configs


_contexts: list[_Context] = []
"""Innermost last. A list, not a ContextVar: torch.compile reads it, and so do the threads in which
a backward pass recomputes checkpointed layers. Models of other threads are distinguished by their
configs."""


@contextmanager
def forward_context(varlen: Varlen, model: nn.Module | None = None) -> Iterator[None]:
    """Make a step's `Varlen` reach every attention layer called inside.

    model: whose layers; None: those of any model, so no other may run in another thread.

    >>> from torch import tensor
    >>> with forward_context(Varlen(tensor([0, 3]), 3)):
    ...     current_varlen().max_length
    3
    """
    context = _Context(varlen, None if model is None else _config_ids(model))
    _contexts.append(context)
    try:
        yield
    finally:
        _contexts.remove(context)  # not the last one, if another thread is inside as well


def current_varlen(module: nn.Module | None = None) -> Varlen | None:
    """Return the `Varlen` of the innermost `forward_context` for a layer, if there is one."""
    if not _contexts:
        return None
    if torch.compiler.is_compiling():
        return _contexts[-1].varlen
    contexts = reversed(tuple(_contexts))  # other threads may add and remove theirs meanwhile
    return next((context.varlen for context in contexts if context.is_for(module)), None)


def has_context(config: Any) -> bool:
    """Return whether a `forward_context` for a model of this config is open."""
    return any(c.configs is None or id(config) in c.configs for c in tuple(_contexts))


def _config_ids(model: nn.Module) -> frozenset[int]:
    configs: list[Any] = [vars(module).get("config") for module in model.modules()]
    return frozenset(id(config) for config in configs if config is not None)
