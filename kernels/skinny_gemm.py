"""Matrix products with few rows (skinny GEMM), where reading the weights is the cost.

    split_k_gemm   x [M, K], weight [N, K]     ─▶ partials [S, M, N], summed by the next kernel
    gated_gemm     x [M, K], gate and up [N, K] ─▶ SiLU(x gateᵀ) * (x upᵀ)

Few rows make few output tiles. Splitting K fills the device, and the partial sums are added in a
fixed order. With PDL (programmatic dependent launch) a kernel starts while the previous one ends,
and waits for it just before it reads. The tile sizes were measured on an H200; for shapes they do
not cover, `gemm_tiles` and `gated_gemm_tiles` return None and the library is faster.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .swiglu import silu


@dataclass(frozen=True, slots=True)
class GemmTiles:
    """Tile sizes of a launch.

    The weights are the tall operand of `tl.dot`: block_n is a multiple of 64, block_m may be small.
    """

    block_m: int
    block_n: int
    block_k: int
    num_splits: int
    num_stages: int = 4


@triton.jit(do_not_specialize=["num_rows"])
def _split_k_kernel(
    x, weight, out, num_rows, num_columns, width, x_stride, split_width,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    offs_k = tl.arange(0, BLOCK_K)
    mask_m = (offs_m < num_rows)[:, None]
    weight_row = tl.minimum(offs_n, num_columns - 1).to(tl.int64)
    x_ptr = x + offs_m[:, None] * x_stride + offs_k[None, :]
    w_ptr = weight + weight_row[:, None] * width + offs_k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for start in range(split * split_width, split * split_width + split_width, BLOCK_K):
        w = tl.load(w_ptr + start)
        a = tl.load(x_ptr + start, mask=mask_m, other=0.0)
        acc = tl.dot(w, a.T, acc)
    out_ptr = out + (split * num_rows + offs_m[:, None]) * num_columns + offs_n[None, :]
    mask = mask_m & (offs_n < num_columns)[None, :]
    tl.store(out_ptr, acc.T.to(out.dtype.element_ty), mask=mask)


def split_k_gemm(x: Tensor, weight: Tensor, tiles: GemmTiles, use_pdl: bool) -> Tensor:
    """Return partials [S, M, N] whose sum is x [M, K] weightᵀ; fp32 where S > 1."""
    num_rows, width = x.shape
    num_columns, num_splits = len(weight), tiles.num_splits
    dtype = x.dtype if num_splits == 1 else torch.float32
    out = torch.empty(num_splits, num_rows, num_columns, dtype=dtype, device=x.device)
    grid = (
        triton.cdiv(num_columns, tiles.block_n),
        num_splits,
        triton.cdiv(num_rows, tiles.block_m),
    )
    _split_k_kernel[grid](
        x, weight, out, num_rows, num_columns, width, x.stride(0), width // num_splits,
        tiles.block_m, tiles.block_n, tiles.block_k, use_pdl,
        num_warps=4, num_stages=tiles.num_stages, **_pdl_option(use_pdl),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _gated_kernel(
    x, gate, up, out, num_rows, num_columns, width, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_m = (offs_m < num_rows)[:, None]
    weight_row = tl.minimum(offs_n, num_columns - 1).to(tl.int64)
    acc_gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    x_ptr = x + offs_m[:, None] * x_stride + offs_k[None, :]
    gate_ptr = gate + weight_row[:, None] * width + offs_k[None, :]
    up_ptr = up + weight_row[:, None] * width + offs_k[None, :]
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for start in range(0, width, BLOCK_K):
        a = tl.load(x_ptr + start, mask=mask_m, other=0.0)
        g = tl.load(gate_ptr + start)
        u = tl.load(up_ptr + start)
        acc_gate = tl.dot(g, a.T, acc_gate)
        acc_up = tl.dot(u, a.T, acc_up)
    dtype = out.dtype.element_ty
    value = silu(acc_gate.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    value = (value * acc_up.to(dtype).to(tl.float32)).to(dtype)
    out_ptr = out + offs_m[:, None] * num_columns + offs_n[None, :]
    tl.store(out_ptr, value.T, mask=mask_m & (offs_n < num_columns)[None, :])


def gated_gemm(x: Tensor, gate: Tensor, up: Tensor, tiles: GemmTiles, use_pdl: bool) -> Tensor:
    """Return SiLU(x gateᵀ) * (x upᵀ) for x [M, K] and weights [N, K]."""
    num_rows, width = x.shape
    num_columns = len(gate)
    out = torch.empty(num_rows, num_columns, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(num_columns, tiles.block_n), 1, triton.cdiv(num_rows, tiles.block_m))
    _gated_kernel[grid](
        x, gate, up, out, num_rows, num_columns, width, x.stride(0),
        tiles.block_m, tiles.block_n, tiles.block_k, use_pdl,
        num_warps=4, num_stages=tiles.num_stages, **_pdl_option(use_pdl),
    )  # fmt: skip
    return out


def _pdl_option(use_pdl: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if use_pdl else {}


def gemm_tiles(num_rows: int, num_columns: int, width: int) -> GemmTiles | None:
    """Return the tiles for x [M, K] weightᵀ, or None where the library is faster."""
    wide_output = num_rows > 64 and num_columns > width
    if num_rows > 128 or wide_output or num_columns > 16384 or width % 128:
        return None
    block_m = 16 if num_rows <= 16 else 64 if num_rows <= 64 else 128
    block_k, num_stages = (256, 3) if block_m == 16 and width % 512 == 0 else (128, 4)
    num_splits = 1
    while num_columns // 64 * num_splits < 96 and width % (num_splits * 2 * block_k) == 0:
        num_splits *= 2
    return GemmTiles(block_m, 64, block_k, num_splits, num_stages)


def gated_gemm_tiles(num_rows: int, num_columns: int, width: int) -> GemmTiles | None:
    """Return the tiles for the gate and up products, or None where the library is faster."""
    narrow = num_columns < 6144
    if num_rows > (256 if narrow else 128) or width % 128:
        return None
    largest = 64 if narrow and num_rows <= 128 else 128
    block_m = max(16, min(triton.next_power_of_2(num_rows), largest))
    if block_m == 16:
        return GemmTiles(block_m, 64, 64, 1, 4)
    return GemmTiles(block_m, 64, 128, 1, 3)
