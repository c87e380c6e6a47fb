"""Prefill, whole, chunked or mixed with decodes: several queries per sequence against its pages.

program (kv head, tile of queries): rows are queries x the group's heads, so keys are read once
per group. Sequences take cu_seqlens[n] // TILE + n as their first tile: a bound that needs no
look at the lengths on the host; surplus tiles return at once.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ..attention.backends import ScoreParams
from .attention_tile import attend_keys, finish
from .paged_decode import padded, precision


@triton.jit
def _find_sequence(cu_seqlens, tile, count, TILE: tl.constexpr):
    """The last sequence whose first tile is not past this one."""
    low = 0
    high = count
    while low < high:
        middle = (low + high) // 2
        if tl.load(cu_seqlens + middle) // TILE + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit(do_not_specialize=["window", "scale", "softcap", "table_stride", "count"])
def _prefill_kernel(
    q, keys, values, table, lengths, cu_seqlens, sinks, out,
    scale, softcap, window, count,
    q_stride_t, q_stride_h, out_stride_t, out_stride_h, table_stride,
    slot_stride_k, head_stride_k, slot_stride_v, head_stride_v,
    GROUP: tl.constexpr, PAD_GROUP: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, PAGE: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, PAD_DK: tl.constexpr, PAD_DV: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    # late tiles see the most keys: start them first
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    sequence = _find_sequence(cu_seqlens, tile, count, TILE)
    start = tl.load(cu_seqlens + sequence)
    queries = tl.load(cu_seqlens + sequence + 1) - start
    first_query = (tile - start // TILE - sequence) * TILE
    if (first_query >= queries) | (queries == 1):
        return
    length = tl.load(lengths + sequence)

    ROWS: tl.constexpr = TILE * PAD_GROUP
    row = tl.arange(0, ROWS)
    query = first_query + row // PAD_GROUP
    head = kv_head * GROUP + row % PAD_GROUP
    mine = (query < queries) & (row % PAD_GROUP < GROUP)
    dk = tl.arange(0, PAD_DK)
    dv = tl.arange(0, PAD_DV)
    token = (start + query).to(tl.int64)
    q_tile = tl.load(
        q + token[:, None] * q_stride_t + head[:, None] * q_stride_h + dk[None, :],
        mask=mine[:, None] & (dk < DK)[None, :], other=0.0,
    )  # fmt: skip
    last = length - queries + query
    first_last = length - queries + first_query
    end = tl.minimum(first_last + TILE, length)
    begin = 0
    plain = (first_last + 1) // BLOCK * BLOCK
    if WINDOW:
        begin = tl.maximum(first_last - window + 1, 0) // BLOCK * BLOCK
        plain = begin
    acc, top, total = attend_keys(
        q_tile, last, begin, plain, end, table + sequence.to(tl.int64) * table_stride,
        keys + kv_head * head_stride_k, values + kv_head * head_stride_v,
        slot_stride_k, slot_stride_v, scale, softcap, window,
        WINDOW, SOFTCAP, PAGE, DK, DV, PAD_DK, PAD_DV, BLOCK, PRECISION,
    )  # fmt: skip

    sink = tl.zeros([ROWS], tl.float32)
    if SINKS:
        sink = tl.load(sinks + head, mask=mine, other=0.0).to(tl.float32)
    result = finish(acc, top, total, sink, SINKS)
    at = out + token[:, None] * out_stride_t + head[:, None] * out_stride_h + dv[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=mine[:, None] & (dv < DV)[None, :])


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """How a launch is cut; found by measuring."""

    rows: int
    block: int
    warps: int
    stages: int


def prefill(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    table: Tensor,
    lengths: Tensor,
    scores: ScoreParams,
    out: Tensor,
    tiles: PrefillTiles,
) -> None:
    """Fill the rows of `out` that belong to sequences with several queries."""
    tokens, heads, dk = q.shape
    page, kv_heads, dv = values.shape[1:]
    group = heads // kv_heads
    pad_group = triton.next_power_of_2(group)
    tile = max(1, tiles.rows // pad_group)
    count = table.shape[0]
    sinks = out if scores.sinks is None else scores.sinks
    _prefill_kernel[(kv_heads, tokens // tile + count)](
        q, keys, values, table, lengths, cu_seqlens, sinks, out,
        scores.scale, scores.softcap or 1.0, scores.window or 0, count,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), table.stride(0),
        keys.stride(1), keys.stride(2), values.stride(1), values.stride(2),
        GROUP=group, PAD_GROUP=pad_group, TILE=tile, WINDOW=scores.window is not None,
        SOFTCAP=scores.softcap is not None, SINKS=scores.sinks is not None,
        PAGE=page, DK=dk, DV=dv, PAD_DK=padded(dk), PAD_DV=padded(dv), BLOCK=tiles.block,
        PRECISION=precision(q), num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
