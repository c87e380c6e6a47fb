"""SwiGLU, forward only: SiLU of the gate times the other branch.

gate ─ SiLU ─┐
up ──────────×─▶ hidden
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Elements per program."""


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


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return SiLU(gate) * up."""
    gate, up = gate.contiguous(), up.contiguous()
    hidden, numel = torch.empty_like(gate), gate.numel()
    if numel:
        _forward_kernel[(triton.cdiv(numel, BLOCK),)](gate, up, hidden, numel, BLOCK)
    return hidden
