"""`step_attention`: the engine's attention as one custom operator, for compiled decoder layers.

running_layer(varlen, layer)     what compiled code inside attends by
step_attention(q, k, v, ...)     the operator: no graph sees the step, its pages or the layer
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ..attend import attend
from ..varlen import Varlen

_step: ContextVar[tuple[Varlen, int]] = ContextVar("nopad_step")
"""The step and the layer of the cache that `step_attention` reads."""

STEP: Any = object()
"""In place of a `Varlen`: a graph that torch.compile traces with it serves every step."""


@contextmanager
def running_layer(varlen: Varlen, layer: int) -> Iterator[None]:
    """Let compiled code inside attend by this step, in this layer of the cache."""
    token = _step.set((varlen, layer))
    try:
        yield
    finally:
        _step.reset(token)


@torch.library.custom_op("nopad::step_attention", mutates_args=())
def step_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Attend in the step and the layer of `running_layer`.

    No graph sees the pages, so that one graph serves every step and layer; nothing in a graph but
    this operator reads or writes them.
    """
    varlen, layer = _step.get()
    params = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    return attend(q, k, v, varlen, layer=layer, **params).contiguous()


@step_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[-1], dtype=v.dtype)
