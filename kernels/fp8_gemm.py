"""Products of e4m3 matrices: those of a linear layer, forward and backward.

    x [T, K], scales [T, 1]    dy [T, N], scales [T, 1]    w [N, K], scale [1, 1]

    y  = x wᵀ     rows of x and w are read
    dx = dy w     wᵀ is written first
    dw = dyᵀ x    both transposes are written first, with the scales of tokens in their values

The tensor cores of Hopper read e4m3 along the dimension that is summed. The transposes are made in
here: if torch.compile writes one in the kernel of a row's scale, every byte is a write of its own.
That of w is made from its precise values, so that a training keeps no e4m3 copy of its weights.

Scales are powers of two, so that moving them into the values changes nothing but the smallest.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ALIGNMENT = 16
"""The library needs sizes of summed dimensions, and of weights, that are multiples of it."""
TILE = 128
"""Rows and columns that a program transposes."""


@torch.library.custom_op("nopad::fp8_linear", mutates_args=())
def fp8_linear(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
    """Return x wᵀ in bf16, [T, N]."""
    return _multiply(x, w.t(), x_scale, _per_column(w_scale, len(w)))


@fp8_linear.register_fake
def _(x, x_scale, w, w_scale):
    return x.new_empty(x.shape[0], w.shape[0], dtype=torch.bfloat16)


@torch.library.custom_op("nopad::fp8_grad_input", mutates_args=())
def fp8_grad_input(dy: Tensor, dy_scale: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
    """Return dy w in bf16, [T, K], where w is not cast yet."""
    transposed = transpose(w, w_scale.reciprocal().expand(len(w), 1).contiguous())
    return _multiply(dy, transposed.t(), dy_scale, _per_column(w_scale, w.shape[1]))


@fp8_grad_input.register_fake
def _(dy, dy_scale, w, w_scale):
    return dy.new_empty(dy.shape[0], w.shape[1], dtype=torch.bfloat16)


@torch.library.custom_op("nopad::fp8_grad_weight", mutates_args=())
def fp8_grad_weight(dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor) -> Tensor:
    """Return dyᵀ x in fp32, [N, K].

    A sum over tokens has one scale, that of the token whose scales have the largest product. The
    values of the others become smaller, by half of the exponent in each operand: a token that is
    large in one of them and small in the other leaves the rest its precision.
    """
    exponents = torch.log2(dy_scale) + torch.log2(x_scale)
    largest = exponents.amax()
    shift = exponents - largest
    half = torch.floor(shift / 2)
    dy, x = transpose(dy, torch.exp2(half)), transpose(x, torch.exp2(shift - half))
    scale = torch.exp2(largest)
    return _multiply(dy, x.t(), scale, torch.ones_like(scale), torch.float32)


@fp8_grad_weight.register_fake
def _(dy, dy_scale, x, x_scale):
    return dy.new_empty(dy.shape[1], x.shape[1], dtype=torch.float32)


def _multiply(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    scales = {"scale_a": a_scale, "scale_b": b_scale}
    return torch._scaled_mm(a, b, **scales, out_dtype=dtype, use_fast_accum=True)


def _per_column(scale: Tensor, columns: int) -> Tensor:
    return scale.expand(1, columns).contiguous()


def transpose(x: Tensor, factors: Tensor) -> Tensor:
    """Cast x [R, C] times factors [R, 1] to e4m3, and return its transpose.

    The result is [C, R'], where R' is R rounded up to a multiple of 16; the rest are zeros.
    """
    (rows, columns), padded = x.shape, triton.cdiv(x.shape[0], ALIGNMENT) * ALIGNMENT
    out = x.new_empty(columns, padded, dtype=torch.float8_e4m3fn)
    is_cast = x.dtype == torch.float8_e4m3fn
    x = x.contiguous().view(torch.uint8) if is_cast else x.contiguous()
    _transpose_kernel[triton.cdiv(columns, TILE), triton.cdiv(padded, TILE)](
        x, factors, out.view(torch.uint8), rows, columns, padded, is_cast, TILE, num_warps=8
    )
    return out


@triton.jit
def _transpose_kernel(
    x, factors, out, rows, columns, padded, IS_CAST: tl.constexpr, TILE: tl.constexpr
):
    c = tl.program_id(0) * TILE + tl.arange(0, TILE)
    r = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = (r < rows)[:, None] & (c < columns)[None, :]
    tile = tl.load(x + r.to(tl.int64)[:, None] * columns + c[None, :], mask=mask, other=0)
    if IS_CAST:
        tile = tile.to(tl.float8e4nv, bitcast=True)
    factor = tl.load(factors + r, mask=r < rows, other=0.0)
    values = (tile.to(tl.float32) * factor[:, None]).to(tl.float8e4nv)
    mask = (c < columns)[:, None] & (r < padded)[None, :]
    place = out + c.to(tl.int64)[:, None] * padded + r[None, :]
    tl.store(place, tl.trans(values.to(tl.uint8, bitcast=True)), mask=mask)
