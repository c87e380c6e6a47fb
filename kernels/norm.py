"""RMSNorm, with the residual add before it and its backward.

    x [rows, width] ────+──▶ residual ─▶ RMSNorm ─▶ out
    deltas [S, rows, width] ┘               └─▶ rstd [rows], for the backward

One forward kernel serves training and generation. Its flags select what is added to x (nothing, one
tensor, or the S partial sums of a split-K product), whether the inverse RMS is stored, and whether
x holds strided heads. The arithmetic is that of the Transformers modules: fp32 inside, rounded to
the dtype of x before the gain.

In the backward each program sums the gain's gradient in registers over its rows; a second kernel
adds up the programs' sums.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import row_block

BACKWARD_PROGRAMS = 264
SUM_ROWS, SUM_COLUMNS = 128, 32
"""Block of partial gain gradients that is summed at once."""


@triton.jit(do_not_specialize=["num_rows", "num_heads", "token_stride"])
def _forward_kernel(
    x, deltas, weight, residual, out, rstd, eps, num_rows, width, num_heads, token_stride,
    NUM_DELTAS: tl.constexpr, STRIDED: tl.constexpr, STORE_RSTD: tl.constexpr,
    BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Normalize one row; results are rounded to the dtype of `residual`."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < width
    gain = tl.load(weight + offs, mask=mask, other=0.0).to(tl.float32)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    start = row * width
    if STRIDED:
        start = row // num_heads * token_stride + row % num_heads * width
    value = tl.load(x + start + offs, mask=mask, other=0.0).to(tl.float32)
    dtype = residual.dtype.element_ty
    if NUM_DELTAS > 0:
        delta = tl.load(deltas + row * width + offs, mask=mask, other=0.0).to(tl.float32)
        for split in tl.static_range(1, NUM_DELTAS):
            partial = deltas + (split * num_rows + row) * width + offs
            delta += tl.load(partial, mask=mask, other=0.0).to(tl.float32)
        value = (value + delta.to(dtype).to(tl.float32)).to(dtype)
        tl.store(residual + row * width + offs, value, mask=mask)
        value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / width + eps)
    if STORE_RSTD:
        tl.store(rstd + row, scale)
    normed = (value * scale).to(dtype).to(tl.float32)
    tl.store(out + row * width + offs, normed * gain, mask=mask)


def _check_shapes(x: Tensor, weight: Tensor, delta: Tensor | None = None) -> None:
    """Raise where the kernel would read beyond the gain or the delta."""
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"a gain {list(weight.shape)} does not fit rows of width {x.shape[-1]}")
    if delta is not None and delta.shape != x.shape:
        raise ValueError(f"{list(delta.shape)} cannot be added to a residual {list(x.shape)}")


def rms_norm(x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype | None = None) -> Tensor:
    """Normalize the last dimension of x and multiply by the gain.

    out_dtype: dtype of the result; default: the wider dtype of x and the gain.
    """
    _check_shapes(x, weight)
    width = x.shape[-1]
    # Heads [1, T, H, D] may be a slice of a wider projection: tokens are then strided.
    strided = x.ndim == 4 and len(x) == 1 and x.stride()[2:] == (width, 1)
    if not strided:
        x = x.contiguous()
    num_heads, token_stride = (x.shape[2], x.stride(1)) if strided else (1, 0)
    out_dtype = out_dtype or torch.promote_types(x.dtype, weight.dtype)
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    block, num_warps = row_block(width)
    if x.numel():
        num_rows = x.numel() // width
        _forward_kernel[(num_rows,)](
            x, x, weight, x, out, x, eps, num_rows, width, num_heads, token_stride,
            0, strided, False, block, False, num_warps=num_warps,
        )  # fmt: skip
    return out


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the residual x + delta and its RMSNorm."""
    _check_shapes(x, weight, delta)
    x, delta = x.contiguous(), delta.contiguous()
    residual = torch.empty_like(x, dtype=torch.promote_types(x.dtype, delta.dtype))
    out = torch.empty_like(x, dtype=torch.promote_types(residual.dtype, weight.dtype))
    width = x.shape[-1]
    block, num_warps = row_block(width)
    if x.numel():
        num_rows = x.numel() // width
        _forward_kernel[(num_rows,)](
            x, delta, weight, residual, out, x, eps, num_rows, width, 1, 0,
            1, False, False, block, False, num_warps=num_warps,
        )  # fmt: skip
    return residual, out


def add_rms_norm_split_k(
    x: Tensor, partials: Tensor, weight: Tensor, eps: float, use_pdl: bool
) -> tuple[Tensor, Tensor]:
    """Return the residual x [M, N] + the sum of partials [S, M, N], and its RMSNorm.

    Without partials (S = 0) the residual is x itself.
    """
    _check_shapes(x, weight)
    num_rows, width = x.shape
    residual, out = torch.empty_like(x) if len(partials) else x, torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _forward_kernel[(num_rows,)](
        x, partials, weight, residual, out, x, eps, num_rows, width, 1, 0,
        len(partials), False, False, block, use_pdl,
        num_warps=max(1, min(8, block // 256)), launch_pdl=use_pdl,
    )  # fmt: skip
    return residual, out


def rms_norm_forward(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the residual (x, or x + delta in x's dtype), its RMSNorm, and 1 / RMS of each row.

    x is contiguous and no narrower than `delta`.
    """
    _check_shapes(x, weight, delta)
    width = x.shape[-1]
    num_rows = x.numel() // width
    residual = x if delta is None else torch.empty_like(x)
    out = torch.empty_like(x, dtype=out_dtype)
    rstd = x.new_empty(num_rows, dtype=torch.float32)
    block, num_warps = row_block(width)
    if num_rows:
        _forward_kernel[(num_rows,)](
            x, x if delta is None else delta.contiguous(), weight, residual, out, rstd, eps,
            num_rows, width, 1, 0,
            0 if delta is None else 1, False, True, block, False, num_warps=num_warps,
        )  # fmt: skip
    return residual, out, rstd


@triton.jit
def _backward_kernel(
    d_out, d_residual, x, weight, rstd, d_x, d_delta, d_weight_sums, num_rows, width,
    ADD_RESIDUAL: tl.constexpr, STORE_DELTA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offs = tl.arange(0, BLOCK)
    mask = offs < width
    gain = tl.load(weight + offs, mask=mask, other=0.0).to(tl.float32)
    d_gain = tl.zeros([BLOCK], tl.float32)
    for row in tl.range(tl.program_id(0), num_rows, tl.num_programs(0), num_stages=3):
        offs_x = tl.cast(row, tl.int64) * width + offs
        scale = tl.load(rstd + row)
        normed = tl.load(x + offs_x, mask=mask, other=0.0).to(tl.float32) * scale
        grad = tl.load(d_out + offs_x, mask=mask, other=0.0).to(tl.float32)
        d_gain += grad * normed.to(x.dtype.element_ty).to(tl.float32)
        grad *= gain
        projection = tl.sum(grad * normed) / width
        grad = scale * (grad - normed * projection)
        if ADD_RESIDUAL:
            grad += tl.load(d_residual + offs_x, mask=mask, other=0.0).to(tl.float32)
        tl.store(d_x + offs_x, grad, mask=mask)
        if STORE_DELTA:
            tl.store(d_delta + offs_x, grad, mask=mask)
    tl.store(d_weight_sums + tl.program_id(0) * width + offs, d_gain, mask=mask)


@triton.jit
def _sum_kernel(sums, out, num_sums, width, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    acc = tl.zeros([BLOCK_COLUMNS], tl.float32)
    for start in range(0, num_sums, BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)[:, None]
        mask = (row < num_sums) & (column < width)
        acc += tl.sum(tl.load(sums + row * width + column, mask=mask, other=0.0), 0)
    offs = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    tl.store(out + offs, acc, mask=offs < width)


def rms_norm_backward(
    d_out: Tensor,
    d_residual: Tensor | None,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    wants_weight: bool,
    delta_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of x, of the delta before it and, if asked for, of the gain.

    x is the normalized tensor. `d_residual`, the gradient that bypasses the norm, is added in the
    same pass. The delta's gradient is that of x, rounded to `delta_dtype` in the same pass.
    """
    d_out, width, num_rows = d_out.contiguous(), x.shape[-1], rstd.numel()
    programs = max(1, min(BACKWARD_PROGRAMS, num_rows))
    d_x, d_weight = torch.empty_like(x), None
    d_delta = d_x if delta_dtype == x.dtype else torch.empty_like(x, dtype=delta_dtype)
    sums = x.new_empty(programs, width, dtype=torch.float32)
    block, num_warps = row_block(width)
    _backward_kernel[(programs,)](
        d_out, d_out if d_residual is None else d_residual.contiguous(), x, weight, rstd, d_x,
        d_delta, sums, num_rows, width, d_residual is not None, d_delta is not d_x, block,
        num_warps=num_warps,
    )  # fmt: skip
    if wants_weight:
        d_weight = torch.empty_like(weight)
        _sum_kernel[(triton.cdiv(width, SUM_COLUMNS),)](
            sums, d_weight, programs, width, SUM_ROWS, SUM_COLUMNS, num_warps=8
        )
    return d_x, d_delta, d_weight
