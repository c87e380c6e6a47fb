"""`split_k_gemm` on Hopper, in Gluon: loads its weights before the previous kernel has ended.

    kernel before   ──────────────┐ x is complete
    this kernel         weights ··└─▶ x ─▶ multiply, while the next weights and x arrive ─▶ …

With PDL, a kernel starts while the previous one ends. The weights do not depend on the previous
kernel: those of the first stages are loaded at once, and x after the wait. Triton's own pipeline
cannot do this, since a loop loads its operands together; Gluon, Triton's lower level, leaves the
order to the kernel. Sums and their order are those of the Triton kernel, so the results are equal
bit for bit.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false, reportAssignmentType=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

if TYPE_CHECKING:
    from .skinny_gemm import GemmTiles

if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):
    raise ImportError("Gluon of Triton 3.6 or later")
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # as in Triton 3.6


@gluon.jit
def _pdl_wait():
    """Wait until the previous kernel has ended."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _pdl_launch():
    """Let the next kernel start."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit(do_not_specialize=["num_rows", "num_blocks"])
def _split_k_kernel(
    x, weight, out, num_rows, num_columns, num_blocks,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    NUM_STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Multiply `num_blocks` blocks of K; the weights are the tall operand, as in Triton."""
    first_m, first_n = gl.program_id(0) * BLOCK_M, gl.program_id(1) * BLOCK_N
    split = gl.program_id(2)
    first_k = split * num_blocks * BLOCK_K
    STAGE_BYTES: gl.constexpr = weight.block_type.nbytes + x.block_type.nbytes
    TALL_WARPS: gl.constexpr = BLOCK_N // 16 if num_warps > BLOCK_N // 16 else num_warps
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[TALL_WARPS, num_warps // TALL_WARPS],
        instr_shape=[16, BLOCK_M // (num_warps // TALL_WARPS), 16],
    )  # fmt: skip
    w_stages = gl.allocate_shared_memory(
        weight.dtype, [NUM_STAGES, BLOCK_N, BLOCK_K], weight.layout
    )
    x_stages = gl.allocate_shared_memory(x.dtype, [NUM_STAGES, BLOCK_M, BLOCK_K], x.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM_STAGES):
        mbarrier.init(loaded.index(i), count=1)
    _pdl_launch()
    for i in gl.static_range(NUM_STAGES):
        mbarrier.expect(loaded.index(i), STAGE_BYTES)
        _load(weight, [first_n, first_k + i * BLOCK_K], loaded.index(i), w_stages.index(i))
    _pdl_wait()
    for i in gl.static_range(NUM_STAGES):
        _load(x, [first_m, first_k + i * BLOCK_K], loaded.index(i), x_stages.index(i))
    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout)
    for block in range(num_blocks):
        stage = block % NUM_STAGES
        mbarrier.wait(loaded.index(stage), (block // NUM_STAGES) & 1)
        a = x_stages.index(stage).permute((1, 0))
        acc = warpgroup_mma(w_stages.index(stage), a, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        # The product before this one has ended, so its stage can be loaded again.
        next_block = block + NUM_STAGES - 1
        k, free = first_k + next_block * BLOCK_K, next_block % NUM_STAGES
        more = (block > 0) & (next_block < num_blocks)
        barrier = loaded.index(free)
        mbarrier.expect(barrier, STAGE_BYTES, more)
        _load(weight, [first_n, k], barrier, w_stages.index(free), more)
        _load(x, [first_m, k], barrier, x_stages.index(free), more)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    out += split * num_rows * num_columns
    _store(acc, out, first_m, first_n, num_rows, num_columns, BLOCK_M, BLOCK_N, num_warps)


@gluon.jit
def _store(
    acc, out, first_m, first_n, num_rows, num_columns,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Store a tile [BLOCK_N, BLOCK_M] as rows, 16 bytes a thread."""
    dtype: gl.constexpr = out.dtype.element_ty
    WIDTH: gl.constexpr = 128 // dtype.primitive_bitwidth
    LANES: gl.constexpr = BLOCK_N // WIDTH if BLOCK_N // WIDTH < 32 else 32
    layout: gl.constexpr = gl.BlockedLayout(
        [1, WIDTH], [32 // LANES, LANES], [num_warps, 1], [1, 0]
    )
    tile = gl.convert_layout(gl.permute(acc.to(dtype), (1, 0)), layout)
    offs_m = first_m + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
    offs_n = first_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
    mask = (offs_m < num_rows)[:, None] & (offs_n < num_columns)[None, :]
    gl.store(out + offs_m[:, None] * num_columns + offs_n[None, :], tile, mask=mask)


def launch_split_k(
    x: Tensor, weight: Tensor, out: Tensor, tiles: GemmTiles, num_warps: int
) -> None:
    """Write the partial sums of x [M, K] weightᵀ into out [S, M, N]."""
    num_splits, num_rows, num_columns = out.shape
    block_m, block_n, block_k = tiles.block_m, tiles.block_n, tiles.block_k
    num_blocks = x.shape[1] // num_splits // block_k
    grid = triton.cdiv(num_rows, block_m), triton.cdiv(num_columns, block_n), num_splits
    _split_k_kernel[grid](
        _blocks(x, block_m, block_k), _blocks(weight, block_n, block_k), out,
        num_rows, num_columns, num_blocks,
        block_m, block_n, block_k, min(tiles.num_stages, num_blocks),
        num_warps=num_warps, launch_pdl=True,
    )  # fmt: skip


def _blocks(matrix: Tensor, num_rows: int, block_k: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [num_rows, block_k], _layout(num_rows, block_k))


@cache
def _layout(num_rows: int, block_k: int) -> gl.NVMMASharedLayout:
    """Return the layout of a block of two-byte numbers in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([num_rows, block_k], gl.bfloat16)
