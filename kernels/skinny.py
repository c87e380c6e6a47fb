"""Products of few rows: by our own kernels where they were measured to be faster than the library.

The tables hold what an H200 chose; a product they do not name goes to the library.
"""

# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
from torch import Tensor

from .skinny_kernels import Tiles, _gated, _product


def product(x: Tensor, weight: Tensor, tiles: Tiles, late: bool) -> Tensor:
    """Parts [S, M, N], in fp32 where S > 1, whose sum is x [M, K] times weight [N, K]."""
    count, width = x.shape
    columns = len(weight)
    kind = x.dtype if tiles.splits == 1 else torch.float32
    out = torch.empty(tiles.splits, count, columns, dtype=kind, device=x.device)
    grid = (triton.cdiv(columns, tiles.columns), tiles.splits, triton.cdiv(count, tiles.rows))
    _product[grid](
        x, weight, out, count, columns, width, x.stride(0), width // tiles.splits,
        tiles.rows, tiles.columns, tiles.depth, late,
        num_warps=4, num_stages=tiles.stages, **_launch(late),
    )  # fmt: skip
    return out


def gated(x: Tensor, gate: Tensor, up: Tensor, tiles: Tiles, late: bool) -> Tensor:
    """SiLU of x times the gate's weights, times x times the other branch's."""
    count, width = x.shape
    out = torch.empty(count, len(gate), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(len(gate), tiles.columns), 1, triton.cdiv(count, tiles.rows))
    _gated[grid](
        x, gate, up, out, count, len(gate), width, x.stride(0),
        tiles.rows, tiles.columns, tiles.depth, late,
        num_warps=4, num_stages=tiles.stages, **_launch(late),
    )  # fmt: skip
    return out


def _launch(late: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if late else {}


def product_tiles(rows: int, columns: int, width: int) -> Tiles | None:
    """How to cut a product of `rows` rows, if our kernel is the faster one."""
    if rows > 128 or (rows > 64 and columns > width) or columns > 16384 or width % 128:
        return None
    tile = 16 if rows <= 16 else 64 if rows <= 64 else 128
    depth, stages = (256, 3) if tile == 16 and width % 512 == 0 else (128, 4)
    splits = 1
    while columns // 64 * splits < 96 and width % (splits * 2 * depth) == 0:
        splits *= 2
    return Tiles(tile, 64, depth, splits, stages)


def gated_tiles(rows: int, columns: int, width: int) -> Tiles | None:
    """How to cut the two products of a gated MLP, if our kernel is the faster one."""
    few = columns < 6144
    if rows > (256 if few else 128) or width % 128:
        return None
    tile = max(16, min(triton.next_power_of_2(rows), 64 if few and rows <= 128 else 128))
    return Tiles(tile, 64, 64, 1, 4) if tile == 16 else Tiles(tile, 64, 128, 1, 3)
