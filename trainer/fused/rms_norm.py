"""Differentiable RMSNorm, with the residual add before it.

x ──────┬─▶ residual ────────▶     the residual add needs no separate pass over memory,
delta ──+      └─▶ norm ─▶ out     neither in the forward nor in the backward

Under autocast the residual stays in the dtype of x, and `out` is rounded to that of the products
that read it, in the same pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels import rms_norm_backward, rms_norm_forward
from .once_differentiable import no_double_backward


class _RMSNorm(torch.autograd.Function):
    """Returns the residual too, so that its gradient is added in the norm's backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        residual, out, rstd = rms_norm_forward(x, delta, weight, eps, dtype)
        ctx.save_for_backward(residual, weight, rstd)
        ctx.set_materialize_grads(False)
        ctx.delta_dtype = x.dtype if delta is None else delta.dtype
        return x.view_as(x) if delta is None else residual, out

    @staticmethod
    @no_double_backward
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, d_residual: Tensor | None, d_out: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        _, wants_delta, wants_weight, *_ = ctx.needs_input_grad
        if d_out is None:
            return d_residual, d_residual if wants_delta else None, None, None, None
        residual, weight, rstd = ctx.saved_tensors
        d_x, d_delta, d_weight = rms_norm_backward(
            d_out, d_residual, residual, weight, rstd, wants_weight, ctx.delta_dtype
        )
        return d_x, d_delta if wants_delta else None, d_weight, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize the last dimension and multiply by the gain."""
    return add_rms_norm(x, None, weight, eps)[1]


def add_rms_norm(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the residual x + delta and its RMSNorm.

    dtype: of the norm; by default the wider one of the residual and the gain.
    """
    if delta is not None:
        is_wider = torch.promote_types(x.dtype, delta.dtype) != x.dtype
        if is_wider or delta.shape != x.shape:  # the kernel keeps dtype and shape of x
            x, delta = x + delta, None
    dtype = dtype or torch.promote_types(x.dtype, weight.dtype)
    outputs: Any = _RMSNorm.apply(x, delta, weight, eps, dtype)
    return outputs
