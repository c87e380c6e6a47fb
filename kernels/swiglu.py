"""SwiGLU: SiLU of the gate times the other branch, and the backward of both.

    gate ─ SiLU ─┐
    up ──────────×─▶ hidden

The backward reads gate, up and d_hidden. It writes d_gate, d_up and, over d_hidden, the hidden
states again, which the gradient of the down projection needs: the forward does not keep them.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TRAINING_BLOCK = 2048
"""Elements per program in training; generation, with few tokens, takes half as many."""


@triton.jit
def silu(x):
    """SiLU in fp32, by the formula of PyTorch's kernel."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _forward_kernel(gate, up, hidden, numel, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < numel
    g = tl.load(gate + offs, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + offs, mask=mask, other=0.0).to(tl.float32)
    activated = silu(g).to(gate.dtype.element_ty).to(tl.float32)
    tl.store(hidden + offs, activated * u, mask=mask)


def silu_mul(gate: Tensor, up: Tensor, block: int = 1024) -> Tensor:
    """Return SiLU(gate) * up."""
    gate, up = gate.contiguous(), up.contiguous()
    hidden, numel = torch.empty_like(gate), gate.numel()
    if numel:
        _forward_kernel[(triton.cdiv(numel, block),)](gate, up, hidden, numel, block)
    return hidden


@triton.jit
def _backward_kernel(gate, up, d_hidden, d_gate, d_up, numel, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < numel
    g = tl.load(gate + offs, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + offs, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(d_hidden + offs, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(g)
    activated = silu(g).to(gate.dtype.element_ty).to(tl.float32)
    tl.store(d_gate + offs, grad * u * sigmoid * (1.0 + g * (1.0 - sigmoid)), mask=mask)
    tl.store(d_up + offs, grad * activated, mask=mask)
    tl.store(d_hidden + offs, activated * u, mask=mask)


def silu_mul_backward(gate: Tensor, up: Tensor, d_hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return d_gate and d_up, and overwrite d_hidden by the hidden states themselves."""
    d_gate, d_up, numel = torch.empty_like(gate), torch.empty_like(up), gate.numel()
    if numel:
        _backward_kernel[(triton.cdiv(numel, TRAINING_BLOCK),)](
            gate, up, d_hidden, d_gate, d_up, numel, TRAINING_BLOCK
        )
    return d_gate, d_up
