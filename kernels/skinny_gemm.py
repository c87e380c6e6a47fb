"""Few-row matrix products (skinny GEMM): split-K partial sums; gate and up products with SiLU.

    split_k_gemm   x [M, K], weight [N, K]     ─▶ partials [S, M, N], summed by the next kernel
    gated_gemm     x [M, K], gate and up [N, K] ─▶ SiLU(x gateᵀ) * (x upᵀ)

Few rows make few output tiles. Splitting K fills the device, and the partial sums are added in a
fixed order. Tiles are read by TMA (tensor descriptors). With PDL (programmatic dependent launch) a
kernel starts while the previous one ends, and waits for it just before it reads; on Hopper
`split_k_gemm` reads its weights before that (`hopper_gemm.py`). The tile sizes were measured on an
H200 (engine-kernels in benchmarks/results/). For shapes they do not cover, `gemm_tiles` and
`gated_gemm_tiles` return None and the library is faster.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import logging
from dataclasses import dataclass
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import is_hopper, sm_count
from .swiglu import silu

try:
    from .hopper_gemm import launch_split_k
except ImportError:  # Triton is older than its Gluon
    launch_split_k = None

log = logging.getLogger("nopad.kernels")

MAX_GEMM_ROWS = 512
"""Largest number of rows with tiles of our own; gate and up have tiles for more."""


@dataclass(frozen=True, slots=True)
class GemmTiles:
    """Tile sizes of a launch.

    The weights are the tall operand of `tl.dot`: block_n is a multiple of 64, block_m may be small.
    """

    block_m: int
    block_n: int
    block_k: int
    num_splits: int = 1
    num_stages: int = 4
    num_warps: int | None = None
    """None: by the size of a tile."""


@triton.jit(do_not_specialize=["num_rows"])
def _split_k_kernel(
    x, weight, out, num_rows, num_columns, split_width,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    first_m, first_n = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    split = tl.program_id(2)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for k in range(split * split_width, split * split_width + split_width, BLOCK_K):
        w = weight.load([first_n, k])
        a = x.load([first_m, k])
        acc = tl.dot(w, a.T, acc)
    offs_m, offs_n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    out_ptr = out + (split * num_rows + offs_m[:, None]) * num_columns + offs_n[None, :]
    mask = (offs_m < num_rows)[:, None] & (offs_n < num_columns)[None, :]
    tl.store(out_ptr, acc.T.to(out.dtype.element_ty), mask=mask)


def split_k_gemm(x: Tensor, weight: Tensor, tiles: GemmTiles, use_pdl: bool) -> Tensor:
    """Return partials [S, M, N] whose sum is x [M, K] weightᵀ; fp32 where S > 1."""
    num_rows, width = x.shape
    num_columns, num_splits = len(weight), tiles.num_splits
    dtype = x.dtype if num_splits == 1 else torch.float32
    out = torch.empty(num_splits, num_rows, num_columns, dtype=dtype, device=x.device)
    if use_pdl and is_hopper(x.device) and _launch_ahead(x, weight, out, tiles):
        return out
    _split_k_kernel[(*_grid(num_rows, num_columns, tiles), num_splits)](
        _blocks(x, tiles.block_m, tiles), _blocks(weight, tiles.block_n, tiles), out,
        num_rows, num_columns, width // num_splits,
        tiles.block_m, tiles.block_n, tiles.block_k, use_pdl,
        **_launch_options(tiles, tiles.block_m * tiles.block_n, use_pdl),
    )  # fmt: skip
    return out


def _launch_ahead(x: Tensor, weight: Tensor, out: Tensor, tiles: GemmTiles) -> bool:
    """Whether the kernel that reads its weights ahead could be launched."""
    global launch_split_k
    if launch_split_k is None or x.element_size() != 2:
        return False
    try:
        launch_split_k(x, weight, out, tiles, _num_warps(tiles, tiles.block_m * tiles.block_n))
        return True
    except Exception as error:  # Gluon is experimental: this Triton may not compile the kernel
        launch_split_k = None
        log.warning("products do not prefetch weights: %s: %s", type(error).__name__, error)
        return False


@triton.jit(do_not_specialize=["num_rows"])
def _gated_kernel(
    x, gate, up, out, num_rows, num_columns, width,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    first_m, first_n = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    acc_gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for k in range(0, width, BLOCK_K):
        a = x.load([first_m, k])
        g = gate.load([first_n, k])
        u = up.load([first_n, k])
        acc_gate = tl.dot(g, a.T, acc_gate)
        acc_up = tl.dot(u, a.T, acc_up)
    dtype = out.dtype.element_ty
    value = silu(acc_gate.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    value = (value * acc_up.to(dtype).to(tl.float32)).to(dtype)
    offs_m, offs_n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    out_ptr = out + offs_m[:, None] * num_columns + offs_n[None, :]
    tl.store(out_ptr, value.T, mask=(offs_m < num_rows)[:, None] & (offs_n < num_columns)[None, :])


def gated_gemm(x: Tensor, gate: Tensor, up: Tensor, tiles: GemmTiles, use_pdl: bool) -> Tensor:
    """Return SiLU(x gateᵀ) * (x upᵀ) for x [M, K] and weights [N, K]."""
    num_rows, width = x.shape
    num_columns = len(gate)
    out = torch.empty(num_rows, num_columns, dtype=x.dtype, device=x.device)
    _gated_kernel[_grid(num_rows, num_columns, tiles)](
        _blocks(x, tiles.block_m, tiles), _blocks(gate, tiles.block_n, tiles),
        _blocks(up, tiles.block_n, tiles), out, num_rows, num_columns, width,
        tiles.block_m, tiles.block_n, tiles.block_k, use_pdl,
        **_launch_options(tiles, 2 * tiles.block_m * tiles.block_n, use_pdl),
    )  # fmt: skip
    return out


def _grid(num_rows: int, num_columns: int, tiles: GemmTiles) -> tuple[int, int]:
    """Return the tiles of rows and of columns; neighbours read the same weights."""
    return triton.cdiv(num_rows, tiles.block_m), triton.cdiv(num_columns, tiles.block_n)


def _blocks(matrix: Tensor, num_rows: int, tiles: GemmTiles) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [num_rows, tiles.block_k])


def _launch_options(tiles: GemmTiles, num_sums: int, use_pdl: bool) -> dict[str, int | bool]:
    """Return Triton's launch options; num_sums: fp32 sums that a program keeps in registers."""
    options = {"num_warps": _num_warps(tiles, num_sums), "num_stages": tiles.num_stages}
    return options | ({"launch_pdl": True} if use_pdl else {})


def _num_warps(tiles: GemmTiles, num_sums: int) -> int:
    return tiles.num_warps or (8 if num_sums >= 128 * 128 else 4)


def gemm_tiles(num_rows: int, weight: Tensor) -> GemmTiles | None:
    """Return the tiles for x [M, K] weightᵀ, or None where the library is faster."""
    num_columns, width = weight.shape
    if num_rows > MAX_GEMM_ROWS or num_columns > 16384 or width % 128 or not _is_aligned(weight):
        return None
    if num_rows > 64:
        return _one_wave(num_rows, num_columns, width, sm_count(weight.device))
    block_m = max(16, triton.next_power_of_2(num_rows))
    block_k, num_stages = (256, 3) if block_m <= 32 and width % 512 == 0 else (128, 4)
    num_splits = 1
    while num_columns // 64 * num_splits < 96 and width % (num_splits * 2 * block_k) == 0:
        num_splits *= 2
    return GemmTiles(block_m, 64, block_k, num_splits, num_stages)


def _one_wave(num_rows: int, num_columns: int, width: int, num_sms: int) -> GemmTiles | None:
    """Return tiles of which nearly every SM computes one, if there are any.

    If several qualify, return those that read the least; partial sums, written and read in fp32,
    count as well.
    """
    best, least = None, float("inf")
    busy_share = 0.7 if num_rows <= 192 else 0.85  # with fewer SMs the library is faster
    for block_m, block_n in ((64, 64), (128, 64), (128, 128), (64, 128)):
        if num_rows % block_m:  # TMA is slow where the last of several tiles is not full
            continue
        num_tiles = num_rows // block_m * triton.cdiv(num_columns, block_n)
        for num_splits in (1,) if block_m == block_n == 128 else (1, 2, 4, 8):
            num_programs = num_tiles * num_splits
            if not busy_share * num_sms <= num_programs <= num_sms or width % (128 * num_splits):
                continue
            cost = (block_m + block_n) * width / num_splits
            cost += 14 * block_m * block_n if num_splits > 1 else 0
            if cost < least:
                block_k = 64 if block_m == block_n == 128 else 128
                stages = 4
                if block_m == block_n == 64:
                    stages = 5 if num_rows <= 128 else 6
                best, least = GemmTiles(block_m, block_n, block_k, num_splits, stages), cost
    return best


def gated_gemm_tiles(num_rows: int, gate: Tensor, up: Tensor) -> GemmTiles | None:
    """Return the tiles for the gate and up products, or None where the library is faster."""
    num_columns, width = gate.shape
    if width % 128 or not (_is_aligned(gate) and _is_aligned(up)):
        return None
    if num_rows > MAX_GEMM_ROWS:
        # "products of many rows" in the record; with more rows the order of tiles matters
        least, most = (640, 2048) if num_columns < 6144 else (1024, 3072)
        is_faster = least <= num_rows <= most and num_rows % 128 == 0
        return GemmTiles(128, 64, 64, num_stages=3, num_warps=4) if is_faster else None
    if num_rows <= 64:
        return GemmTiles(max(16, triton.next_power_of_2(num_rows)), 64, 128)
    if num_rows % 64:
        return None
    if num_columns < 6144:
        return GemmTiles(64, 64, 128 if num_rows == 128 else 64)
    if num_rows == 192:
        return GemmTiles(64, 64, 64, num_stages=3)
    if num_rows == 128:
        return GemmTiles(128, 64, 64, num_stages=6)
    tiles = GemmTiles(128, 128, 64)
    num_tiles, num_sms = prod(_grid(num_rows, num_columns, tiles)), sm_count(gate.device)
    is_full = num_tiles >= 0.85 * num_sms * triton.cdiv(num_tiles, num_sms)  # the last wave too
    return tiles if is_full and num_rows % 128 == 0 else None


def _is_aligned(weight: Tensor) -> bool:
    """Whether TMA can read it: rows without gaps that begin at multiples of 16 bytes."""
    row_bytes = weight.shape[1] * weight.element_size()
    return weight.is_contiguous() and weight.data_ptr() % 16 == 0 and row_bytes % 16 == 0
