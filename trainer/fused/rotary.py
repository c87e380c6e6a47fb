"""Differentiable rotary position embedding of queries and keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels import rotate_heads
from .once_differentiable import no_double_backward


class _Rotary(torch.autograd.Function):
    """Returns [1, T, H, D]: autograd forbids in-place changes of views returned here."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return rotate_heads(q, k, cos, sin)

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, d_q: Tensor, d_k: Tensor) -> tuple[Tensor, Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        d_q, d_k = rotate_heads(d_q.transpose(1, 2), d_k.transpose(1, 2), cos, sin, inverse=True)
        return d_q.transpose(1, 2), d_k.transpose(1, 2), None, None


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q [1, H, T, D] and k [1, Hkv, T, D] by cos and sin [1, T, D]."""
    rotated: Any = _Rotary.apply(q, k, cos, sin)
    return rotated[0].transpose(1, 2), rotated[1].transpose(1, 2)
