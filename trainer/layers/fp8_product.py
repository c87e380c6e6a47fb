"""The product of a linear layer in fp8, cast from operands in higher precision.

    x [T, K]       e4m3, a scale per token
    dy [T, N]      e4m3, a scale per token
    weight [N, K]  e4m3, one scale

No scale of the forward, and none of the gradient of the input, spans two tokens: documents of a
pack stay as isolated as in bf16. torch.compile joins the casts with the kernels before them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels import fp8_grad_input, fp8_grad_weight, fp8_linear

_DTYPE = torch.float8_e4m3fn
_LARGEST = torch.finfo(_DTYPE).max


class Fp8Product(torch.autograd.Function):
    """x [T, K] times the transpose of a weight [N, K], forward and backward in fp8."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return _rounded(fp8_linear(*cast(x, per_row=True), *cast(weight)), x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        # In a graph, casts of the forward are the same: it keeps their results or sources.
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        dy, d_x, d_weight = cast(grad, per_row=True), None, None
        if needs_x:
            d_x = _rounded(fp8_grad_input(*dy, weight, cast(weight)[1]), x.dtype)
        if needs_weight:
            d_weight = _rounded(fp8_grad_weight(*dy, *cast(x, per_row=True)), weight.dtype)
        return d_x, d_weight


def _rounded(out: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a product in a dtype.

    A call of `to` that changes nothing must not be traced: in a graph of torch 2.11, a forward that
    ends in one has gradients of zero.
    """
    return out if out.dtype == dtype else out.to(dtype)


def cast(x: Tensor, per_row: bool = False) -> tuple[Tensor, Tensor]:
    """Return x in e4m3 and its scales, powers of two: [R, 1], or one for all values [1, 1].

    >>> values, scales = cast(torch.tensor([[896.0, 2.0], [0.25, 0.5]]), per_row=True)
    >>> values.tolist(), scales.tolist()
    ([[448.0, 1.0], [128.0, 256.0]], [[2.0], [0.001953125]])
    """
    x = x.float()
    largest = x.abs().amax(1, keepdim=True) if per_row else x.abs().amax().view(1, 1)
    # Rows of zeros get a scale, too; one that is not finite makes its row so.
    exponent = torch.ceil(torch.log2(largest.clamp(min=1e-30) / _LARGEST))
    return (x * torch.exp2(-exponent)).to(_DTYPE), torch.exp2(exponent)
