"""Root-mean-square norm with its backward: Triton kernels that keep one number per token.

    x ──────┬─▶ total ─────────────▶     what goes past the norm, and what is added to it before,
    delta ──+     └─▶ norm ─▶ out        take no pass over memory of their own, either way

Arithmetic as the modules have it: fp32 inside, rounded before the gain. The gain's gradient is
summed in registers while rows go by, one partial sum per program, and those sums are added last.
"""

# Triton launches with what its kernels declare, plus settings of its own.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..trainer.fused.autograd import alone

PROGRAMS = 264
ROWS, COLUMNS = 128, 32
"""What is added up at once of the programs' sums."""


@triton.jit
def _forward(
    x, delta, weight, total, out, scales, width, eps, ADDS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WIDTH)
    inside = place < width
    at = row * width + place
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        value = value.to(x.dtype.element_ty).to(tl.float32)
        tl.store(total + at, value, mask=inside)
    scale = tl.rsqrt(tl.sum(value * value) / width + eps)
    tl.store(scales + row, scale)
    rounded = (value * scale).to(x.dtype.element_ty).to(tl.float32)
    gain = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, rounded * gain, mask=inside)


@triton.jit
def _backward(
    d_out, d_total, x, weight, scales, d_x, d_weights, rows, width,
    PASSES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    place = tl.arange(0, WIDTH)
    inside = place < width
    gain = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    d_gain = tl.zeros([WIDTH], tl.float32)
    for number in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=3):
        at = tl.cast(number, tl.int64) * width + place
        scale = tl.load(scales + number)
        normed = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale
        rise = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
        d_gain += rise * normed.to(x.dtype.element_ty).to(tl.float32)
        rise *= gain
        along = tl.sum(rise * normed) / width
        rise = scale * (rise - normed * along)
        if PASSES:
            rise += tl.load(d_total + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(d_x + at, rise, mask=inside)
    tl.store(d_weights + tl.program_id(0) * width + place, d_gain, mask=inside)


@triton.jit
def _add_up(sums, out, count, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    place = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        inside = (row < count) & (place < width)
        total += tl.sum(tl.load(sums + row * width + place, mask=inside, other=0.0), 0)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(out + column, total, mask=column < width)


class _RMSNorm(torch.autograd.Function):
    """The norm of x, or of x + delta; with what was normed, so that its gradient comes here too."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        rows, width = x.numel() // x.shape[-1], x.shape[-1]
        total = x.view_as(x) if delta is None else torch.empty_like(x)
        out, scales = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
        block, warps = _shape(width)
        if rows:
            _forward[(rows,)](
                x, x if delta is None else delta.contiguous(), weight, total, out, scales, width,
                eps, delta is not None, block, num_warps=warps,
            )  # fmt: skip
        ctx.save_for_backward(x if delta is None else total, weight, scales)
        ctx.set_materialize_grads(False)
        return total, out

    @staticmethod
    @alone
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, d_total: Tensor | None, d_out: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        wants_delta = ctx.needs_input_grad[1]
        if d_out is None:
            return d_total, d_total if wants_delta else None, None, None
        x, weight, scales = ctx.saved_tensors
        d_out, width, rows = d_out.contiguous(), x.shape[-1], scales.numel()
        programs = max(1, min(PROGRAMS, rows))
        d_x, d_weight = torch.empty_like(x), None
        sums = x.new_empty(programs, width, dtype=torch.float32)
        block, warps = _shape(width)
        _backward[(programs,)](
            d_out, d_out if d_total is None else d_total.contiguous(), x, weight, scales, d_x,
            sums, rows, width, d_total is not None, block, num_warps=warps,
        )  # fmt: skip
        if ctx.needs_input_grad[2]:
            d_weight = torch.empty_like(weight)
            _add_up[(triton.cdiv(width, COLUMNS),)](
                sums, d_weight, programs, width, ROWS, COLUMNS, num_warps=8
            )
        return d_x, d_x if wants_delta else None, d_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm over the last dimension, then the gain; x and weight of one dtype."""
    return passed_norm(x, None, weight, eps)[1]


def passed_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return x + delta, and its norm: gradients of both are added in the norm's own backward."""
    if delta is not None and torch.promote_types(x.dtype, delta.dtype) != x.dtype:
        x, delta = x + delta, None  # the sum is wider than x
    both: Any = _RMSNorm.apply(x, delta, weight, eps)
    return both


def _shape(width: int) -> tuple[int, int]:
    block = triton.next_power_of_2(width)
    return block, 1 if block <= 256 else 4 if block <= 2048 else 8
