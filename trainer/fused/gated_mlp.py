"""Differentiable gated MLP that does not keep its hidden states.

x ─┬─ gate ─ SiLU ─┐                     kept for the backward: x, gate, up
   └─ up ──────────×─ hidden ─ down      recomputed: hidden
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels import TRAINING_BLOCK, silu_mul, silu_mul_backward
from .once_differentiable import no_double_backward


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        gate, up = rows @ w_gate.T, rows @ w_up.T
        hidden = silu_mul(gate, up, TRAINING_BLOCK)
        ctx.save_for_backward(rows, gate, up, w_gate, w_up, w_down)
        ctx.shape = x.shape
        return hidden @ w_down.T  # 2-D: autograd forbids in-place changes of a view returned here

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows, gate, up, w_gate, w_up, w_down = ctx.saved_tensors
        hidden = d_out @ w_down  # d_hidden, which the kernel overwrites by the hidden states
        d_gate, d_up = silu_mul_backward(gate, up, hidden)
        wanted = ctx.needs_input_grad[1:]
        pairs = ((d_gate, rows), (d_up, rows), (d_out, hidden))
        d_weights = [a.T @ b if w else None for w, (a, b) in zip(wanted, pairs, strict=True)]
        d_x = (d_gate @ w_gate).addmm_(d_up, w_up)
        return d_x.view(ctx.shape), *d_weights


def gated_mlp(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    """Return down(SiLU(gate(x)) * up(x)) for weights without biases."""
    out = _GatedMLP.apply(x, w_gate, w_up, w_down)
    assert isinstance(out, Tensor)
    return out.view(*x.shape[:-1], out.shape[-1])
