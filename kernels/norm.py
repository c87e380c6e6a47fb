"""RMSNorm, forward only; alone, or after a residual add or the sum of split-K partials.

    x [rows, width] ────+──▶ residual ─▶ RMSNorm ─▶ out
    deltas [S, rows, width] ┘

Flags of the kernel select what is added to x (nothing, one tensor, or the S partial sums of a
split-K product), and whether x holds strided heads. The arithmetic is that of the Transformers
modules: fp32 inside, rounded to the dtype of x before the gain.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import row_block


@triton.jit(do_not_specialize=["num_rows", "num_heads", "token_stride"])
def _forward_kernel(
    x, deltas, weight, residual, out, eps, num_rows, width, num_heads, token_stride,
    NUM_DELTAS: tl.constexpr, STRIDED: tl.constexpr,
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
    normed = (value * scale).to(dtype).to(tl.float32)
    tl.store(out + row * width + offs, normed * gain, mask=mask)


def _check_shapes(x: Tensor, weight: Tensor, delta: Tensor | None = None) -> None:
    """Raise where the kernel would read beyond the gain or the delta."""
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"a gain {list(weight.shape)} does not fit rows of width {x.shape[-1]}")
    if delta is not None and delta.shape != x.shape:
        raise ValueError(f"{list(delta.shape)} cannot be added to a residual {list(x.shape)}")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize the last dimension of x and multiply by the gain."""
    _check_shapes(x, weight)
    width = x.shape[-1]
    # Heads [1, T, H, D] may be a slice of a wider projection: tokens are then strided.
    strided = x.ndim == 4 and len(x) == 1 and x.stride()[2:] == (width, 1)
    if not strided:
        x = x.contiguous()
    num_heads, token_stride = (x.shape[2], x.stride(1)) if strided else (1, 0)
    dtype = torch.promote_types(x.dtype, weight.dtype)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    block, num_warps = row_block(width)
    if x.numel():
        num_rows = x.numel() // width
        _forward_kernel[(num_rows,)](
            x, x, weight, x, out, eps, num_rows, width, num_heads, token_stride,
            0, strided, block, False, num_warps=num_warps,
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
            x, delta, weight, residual, out, eps, num_rows, width, 1, 0,
            1, False, block, False, num_warps=num_warps,
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
        x, partials, weight, residual, out, eps, num_rows, width, 1, 0,
        len(partials), False, block, use_pdl,
        num_warps=max(1, min(8, block // 256)), launch_pdl=use_pdl,
    )  # fmt: skip
    return residual, out
