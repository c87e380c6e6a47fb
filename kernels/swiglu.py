"""A gated MLP that keeps its two products, and not what it makes of them.

    x ─┬─ gate ─ silu ─┐                     kept: x, gate, up
       └─ up ──────────×─ hidden ─ down      made again in the backward: hidden

The kernel of the backward reads gate, up and d hidden, and leaves d gate, d up and, in place of
d hidden, the hidden states that the gradient of `down` needs.
"""

# Triton launches with what its kernels declare, plus settings of its own.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..trainer.fused.autograd import alone

BLOCK = 2048


@triton.jit
def _forward(gate, up, hidden, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    opened = (g * tl.sigmoid(g)).to(gate.dtype.element_ty).to(tl.float32)
    tl.store(hidden + place, opened * u, mask=inside)


@triton.jit
def _backward(gate, up, d_hidden, d_gate, d_up, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    rise = tl.load(d_hidden + place, mask=inside, other=0.0).to(tl.float32)
    open_ = tl.sigmoid(g)
    opened = (g * open_).to(gate.dtype.element_ty).to(tl.float32)
    tl.store(d_gate + place, rise * u * open_ * (1.0 + g * (1.0 - open_)), mask=inside)
    tl.store(d_up + place, rise * opened, mask=inside)
    tl.store(d_hidden + place, opened * u, mask=inside)


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        gate, up = rows @ w_gate.T, rows @ w_up.T
        hidden = torch.empty_like(gate)
        if gate.numel():
            grid = (triton.cdiv(gate.numel(), BLOCK),)
            _forward[grid](gate, up, hidden, gate.numel(), BLOCK)
        ctx.save_for_backward(rows, gate, up, w_gate, w_up, w_down)
        ctx.shape = x.shape
        return hidden @ w_down.T  # rows: a view could not be changed in place

    @staticmethod
    @alone
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows, gate, up, w_gate, w_up, w_down = ctx.saved_tensors
        hidden = d_out @ w_down  # its gradient, until the kernel has run
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        if gate.numel():
            grid = (triton.cdiv(gate.numel(), BLOCK),)
            _backward[grid](gate, up, hidden, d_gate, d_up, gate.numel(), BLOCK)
        wanted = ctx.needs_input_grad[1:]
        pairs = ((d_gate, rows), (d_up, rows), (d_out, hidden))
        d_weights = [a.T @ b if w else None for w, (a, b) in zip(wanted, pairs, strict=True)]
        d_x = (d_gate @ w_gate).addmm_(d_up, w_up)
        return d_x.view(ctx.shape), *d_weights


def gated_mlp(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    """down(silu(gate(x)) * up(x)), of weights without biases."""
    out = _GatedMLP.apply(x, w_gate, w_up, w_down)
    assert isinstance(out, Tensor)
    return out.view(*x.shape[:-1], out.shape[-1])
