"""Linear layers of one input as one operation, whose input gradient is summed in products.

x ─┬─ q      d_x = d_q · Wq + d_k · Wk + d_v · Wv     the sums are accumulated inside the second
   ├─ k                                               and third product: no pass over memory
   └─ v                                               for each of them

If x is a normalized residual, the backward normalizes the residual again instead of keeping x.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .normed_rows import NormedRows, find_source
from .once_differentiable import no_double_backward
from .projection import (
    Projection,
    flatten,
    forward_products,
    input_gradient,
    low_rank_gradient,
    parameter_gradients,
    unflatten,
)


class _LinearGroup(torch.autograd.Function):
    """Returns 2-D tensors: autograd forbids in-place changes of views returned here."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        source: NormedRows | None,
        projections: Sequence[Projection],
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        rows = x.flatten(0, -2).to(projections[0].weight.dtype)
        outs, low = forward_products(rows, projections)
        ctx.dtypes = wanted_dtypes(ctx.needs_input_grad[3:], tensors)
        ctx.shape, ctx.scalings = x.shape, tuple(p.scaling for p in projections)
        save_rows(ctx, rows, source, low, *flatten(projections))
        ctx.set_materialize_grads(False)
        return tuple(outs)

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, *d_outs: Tensor | None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows, low, *tensors = saved_rows(ctx)
        projections = unflatten(tensors, ctx.scalings)
        d_low = low_rank_gradient(d_outs, projections, low)
        d_x = input_gradient(d_outs, projections, d_low) if ctx.needs_input_grad[0] else None
        grads = parameter_gradients(d_outs, d_low, rows, low, projections, ctx.dtypes)
        return None if d_x is None else d_x.view(ctx.shape), None, None, *grads


def wanted_dtypes(
    wanted: Sequence[bool], tensors: Sequence[Tensor | None]
) -> list[torch.dtype | None]:
    """Return the dtype of each tensor that gets a gradient, and None for the others."""
    pairs = zip(wanted, tensors, strict=True)
    return [tensor.dtype if w and tensor is not None else None for w, tensor in pairs]


def save_rows(
    ctx: Any,
    rows: Tensor,
    source: NormedRows | None,
    *tensors: Tensor | None,
    always: bool = False,
) -> None:
    """Save tensors for the backward, with the rows, or what they were normalized from, first.

    The rows are needed for gradients of weights, or `always`.
    """
    needs_rows = always or any(dtype is not None for dtype in ctx.dtypes)
    ctx.source = source and source.settings
    kept = (None, None) if not needs_rows else (rows, None) if source is None else source.tensors
    ctx.save_for_backward(*kept, *tensors)


def saved_rows(ctx: Any) -> tuple[Tensor | None, ...]:
    """Return the rows and the other tensors that `save_rows` saved."""
    first, gain, *tensors = ctx.saved_tensors
    if first is not None and ctx.source is not None:
        first = NormedRows(first, gain, *ctx.source).rows()
    return first, *tensors


def linear_group(
    x: Tensor, projections: Sequence[Projection], dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Return the output of each projection for x, computed in `dtype`."""
    cast = [p.cast(dtype) for p in projections]  # here, where autograd's mode is the caller's
    outs: Any = _LinearGroup.apply(x, find_source(x, dtype), cast, *flatten(projections))
    return tuple(out.view(*x.shape[:-1], out.shape[-1]) for out in outs)
