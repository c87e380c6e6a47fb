"""Root-mean-square norm with its backward: Triton kernels that keep one number per token.

Arithmetic as the modules have it: fp32 inside, rounded before the gain. The gain's gradient is
summed in registers while rows go by, one partial sum per program, and those sums are added last.
"""

# Triton launches with what its kernels declare, plus settings of its own.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 512


@triton.jit
def _forward(x, weight, out, scales, width, eps, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WIDTH)
    inside = place < width
    value = tl.load(x + row * width + place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / width + eps)
    tl.store(scales + row, scale)
    rounded = (value * scale).to(x.dtype.element_ty).to(tl.float32)
    gain = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + place, rounded * gain, mask=inside)


@triton.jit
def _backward(
    d_out, x, weight, scales, d_x, d_weights, rows, width, WIDTH: tl.constexpr
):  # fmt: skip
    place = tl.arange(0, WIDTH)
    inside = place < width
    gain = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    d_gain = tl.zeros([WIDTH], tl.float32)
    for number in range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0)):
        at = number * width + place
        scale = tl.load(scales + number)
        normed = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale
        rise = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
        d_gain += rise * normed.to(x.dtype.element_ty).to(tl.float32)
        rise *= gain
        along = tl.sum(rise * normed) / width
        tl.store(d_x + at, scale * (rise - normed * along), mask=inside)
    tl.store(d_weights + tl.program_id(0) * width + place, d_gain, mask=inside)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        width = x.shape[-1]
        rows = x.numel() // width
        out, scales = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
        block, warps = _shape(width)
        if rows:
            _forward[(rows,)](x, weight, out, scales, width, eps, block, num_warps=warps)
        ctx.save_for_backward(x, weight, scales)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, scales = ctx.saved_tensors
        d_out, width, rows = d_out.contiguous(), x.shape[-1], scales.numel()
        programs = max(1, min(PROGRAMS, rows))
        d_x, sums = torch.empty_like(x), x.new_empty(programs, width, dtype=torch.float32)
        block, warps = _shape(width)
        _backward[(programs,)](
            d_out, x, weight, scales, d_x, sums, rows, width, block, num_warps=warps
        )
        return d_x, sums.sum(0).to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm over the last dimension, then the gain; x and weight of one dtype."""
    out = _RMSNorm.apply(x, weight, eps)
    assert isinstance(out, Tensor)
    return out


def _shape(width: int) -> tuple[int, int]:
    block = triton.next_power_of_2(width)
    return block, 1 if block <= 256 else 4 if block <= 2048 else 8
