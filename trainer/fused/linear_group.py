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

from .once_differentiable import no_double_backward
from .projection import (
    Projection,
    flatten,
    forward_products,
    input_gradient,
    low_rank_gradient,
    parameter_gradients,
)
from .saved_rows import NormedRows, find_source, save_products, saved_products


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
        save_products(ctx, x, rows, source, projections, tensors, (low,))
        ctx.set_materialize_grads(False)
        return tuple(outs)

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, *d_outs: Tensor | None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows, projections, (low,) = saved_products(ctx)
        d_low = low_rank_gradient(d_outs, projections, low)
        d_x = input_gradient(d_outs, projections, d_low) if ctx.needs_input_grad[0] else None
        grads = parameter_gradients(d_outs, d_low, rows, low, projections, ctx.dtypes)
        return None if d_x is None else d_x.view(ctx.shape), None, None, *grads


def linear_group(
    x: Tensor, projections: Sequence[Projection], dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Return the output of each projection for x, computed in `dtype`."""
    cast = [p.cast(dtype) for p in projections]  # here, where autograd's mode is the caller's
    outs: Any = _LinearGroup.apply(x, find_source(x, dtype), cast, *flatten(projections))
    return tuple(out.view(*x.shape[:-1], out.shape[-1]) for out in outs)
