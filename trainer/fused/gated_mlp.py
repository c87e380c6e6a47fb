"""Differentiable gated MLP that does not keep its hidden states.

x ─┬─ gate ─ SiLU ─┐                     kept for the backward: x or its source, gate, up
   └─ up ──────────×─ hidden ─ down      recomputed: hidden

In a checkpointed layer, which is recomputed in the backward, only x is kept, and gate and up are
computed chunk by chunk, so that [T, intermediate] never exists. A separate operation before the MLP
saves the tensors of the backward: the recomputation of the layer stops there, and does not run the
MLP at all.

x ─▶ anchor: saves x ─▶ MLP, saves nothing ─▶ out
d_x ◀─ anchor: the whole backward ◀─ d_out ◀─ d_out
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels import TRAINING_BLOCK, silu_mul, silu_mul_backward
from .once_differentiable import no_double_backward
from .projection import (
    TENSORS_PER_PROJECTION,
    Projection,
    flatten,
    forward_products,
    input_gradient,
    low_rank_gradient,
    parameter_gradients,
)
from .saved_rows import NormedRows, find_source, save_products, saved_products

CHUNK_BYTES = 1 << 28
"""Largest [rows, intermediate] of a chunk in a checkpointed layer."""


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        source: NormedRows | None,
        projections: Sequence[Projection],
        *tensors: Tensor | None,
    ) -> Tensor:
        rows = x.flatten(0, -2).to(projections[0].weight.dtype)
        out, kept = _forward(rows, projections)
        save_products(ctx, x, rows, source, projections, tensors, kept)
        return out  # 2-D: autograd forbids in-place changes of a view returned here

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows, projections, kept = saved_products(ctx)
        wants_x = ctx.needs_input_grad[0]
        d_x, grads = _backward(d_out, rows, kept, projections, ctx.dtypes, wants_x)
        return None if d_x is None else d_x.view(ctx.shape), None, None, *grads


class _Anchor(torch.autograd.Function):
    """Returns x, and computes the whole backward of the MLP that follows."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        source: NormedRows | None,
        projections: Sequence[Projection],
        *tensors: Tensor | None,
    ) -> Tensor:
        rows = x.flatten(0, -2).to(projections[0].weight.dtype)
        save_products(ctx, x, rows, source, projections, tensors, needs_rows=True)
        return x.view_as(x)

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows, projections, _ = saved_products(ctx)
        assert rows is not None
        d_out, wants_x = d_out.flatten(0, -2), ctx.needs_input_grad[0]
        d_x = torch.empty_like(rows) if wants_x else None
        sum_dtypes = [d and torch.promote_types(d, torch.float32) for d in ctx.dtypes]
        totals: list[Tensor | None] = [None] * len(sum_dtypes)
        for chunk in _chunks(rows, projections):
            _, kept = _forward(rows[chunk], projections, wants_out=False)
            d_rows, grads = _backward(
                d_out[chunk], rows[chunk], kept, projections, sum_dtypes, wants_x
            )
            totals = [_sum(*pair) for pair in zip(totals, grads, strict=True)]
            if d_x is not None and d_rows is not None:
                d_x[chunk] = d_rows
        pairs = zip(totals, ctx.dtypes, strict=True)
        grads = [total if total is None else total.to(dtype) for total, dtype in pairs]
        return None if d_x is None else d_x.view(ctx.shape), None, None, *grads


class _AnchoredMLP(torch.autograd.Function):
    """The MLP after an anchor: passes the gradient of its output on to the anchor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, projections: Sequence[Projection]) -> Tensor:
        rows = x.flatten(0, -2).to(projections[0].weight.dtype)
        out = torch.empty_like(rows)
        for chunk in _chunks(rows, projections):
            out[chunk], _ = _forward(rows[chunk], projections)
        ctx.shape = x.shape
        return out  # 2-D, as above

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return d_out.view(ctx.shape), None


def _sum(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    return more if total is None or more is None else total.add_(more)


def _chunks(rows: Tensor, projections: Sequence[Projection]) -> list[slice]:
    row_bytes = len(projections[0].weight) * rows.element_size()
    step = max(1, CHUNK_BYTES // row_bytes)
    return [slice(start, start + step) for start in range(0, len(rows), step)]


def _forward(
    rows: Tensor, projections: Sequence[Projection], wants_out: bool = True
) -> tuple[Any, tuple[Tensor | None, ...]]:
    """Return the output, and gate, up and the products with A, for the backward."""
    *gate_and_up, down = projections
    (gate, up), low = forward_products(rows, gate_and_up)
    out = low_down = None
    if wants_out or down.lora_a is not None:
        hidden = silu_mul(gate, up, TRAINING_BLOCK)
        if wants_out:
            (out,), low_down = forward_products(hidden, [down])
        elif down.lora_a is not None:
            low_down = hidden @ down.lora_a.T
    return out, (gate, up, low, low_down)


def _backward(
    d_out: Tensor,
    rows: Tensor | None,
    kept: tuple[Tensor | None, ...],
    projections: Sequence[Projection],
    dtypes: Sequence[torch.dtype | None],
    wants_rows: bool,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Return the gradients of the rows and, in the order of `flatten`, of the projections."""
    gate, up, low, low_down = kept
    assert gate is not None and up is not None
    *gate_and_up, down = projections
    size = len(gate_and_up) * TENSORS_PER_PROJECTION
    d_low_down = low_rank_gradient([d_out], [down], low_down)
    hidden = input_gradient([d_out], [down], d_low_down)
    assert hidden is not None  # d_hidden, which the kernel overwrites by the hidden states
    d_outs = silu_mul_backward(gate, up, hidden)
    down_grads = parameter_gradients([d_out], d_low_down, hidden, low_down, [down], dtypes[size:])
    d_low = low_rank_gradient(d_outs, gate_and_up, low)
    grads = parameter_gradients(d_outs, d_low, rows, low, gate_and_up, dtypes[:size])
    d_rows = input_gradient(d_outs, gate_and_up, d_low) if wants_rows else None
    return d_rows, [*grads, *down_grads]


def gated_mlp(x: Tensor, projections: Sequence[Projection], dtype: torch.dtype) -> Tensor:
    """Return down(SiLU(gate(x)) * up(x)), computed in `dtype`.

    projections: gate, up and down.
    """
    source, tensors = find_source(x, dtype), flatten(projections)
    cast = [p.cast(dtype) for p in projections]  # here, where autograd's mode is the caller's
    keeps_width = projections[-1].weight.shape[0] == x.shape[-1]
    if source is not None and source.is_recomputed and keeps_width:
        out: Any = _AnchoredMLP.apply(_Anchor.apply(x, source, cast, *tensors), cast)
    else:
        out = _GatedMLP.apply(x, source, cast, *tensors)
    return out.view(*x.shape[:-1], out.shape[-1])
