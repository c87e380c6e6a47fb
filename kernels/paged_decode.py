"""Decode: one query per sequence against its pages, memory-bound, keys shared out evenly.

    lengths            ▇▇▇▇▇▇▇▇▇▇▇▇ ▇▇ ▇▇▇▇▇ ▇▇      known on the device only
    shares of keys     ▇▇▇▇|▇▇▇▇|▇▇▇▇ ▇▇ ▇▇▇▇▇ ▇▇    a program each, for every kv head

A program takes one share; the group's query heads are the rows of a small product. Only sequences
longer than twice an even share are split, so that programs of a batch of like lengths run all at
once, and one long sequence is no tail. What was split is joined by a second kernel. Sequences with
another number of queries than one are left to the prefill kernel.

Where the device can (LATE), a kernel is launched while the one before it ends: it finds out where
its share lies, from what the host sent long before, and then waits for queries and keys.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention.backends import ScoreParams
from .attention_tile import attend_keys, finish

LEAST_SHARE = 128
"""Keys that are worth a program of their own."""


@triton.jit
def _shares(
    cu_seqlens, lengths, count, room, most, window,
    WINDOW: tl.constexpr, COUNT: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """[COUNT]: programs that share the keys of each sequence; none without a single query.

    At most room + count in all, since only whole even shares of a `room`-th make a program.
    """
    n = tl.arange(0, COUNT)
    start = tl.load(cu_seqlens + n, mask=n < count, other=0)
    stop = tl.load(cu_seqlens + n + 1, mask=n < count, other=0)
    keys = tl.load(lengths + n, mask=n < count, other=0)
    if WINDOW:
        keys = tl.minimum(keys, window)
    decodes = stop - start == 1
    total = tl.sum(tl.where(decodes, keys, 0), 0)
    even = tl.maximum(tl.cdiv(total, room), LEAST)
    return tl.where(decodes, tl.minimum(tl.maximum(keys // even, 1), most), 0)


@triton.jit(
    do_not_specialize=["window", "scale", "softcap", "table_stride", "count", "room", "most"]
)
def _decode_kernel(
    q, keys, values, table, lengths, cu_seqlens, sinks, out, parts, part_lse,
    scale, softcap, window, count, room, most,
    q_stride_t, q_stride_h, out_stride_t, out_stride_h, table_stride,
    slot_stride_k, head_stride_k, slot_stride_v, head_stride_v,
    GROUP: tl.constexpr, SINGLE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, PAGE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    PAD_DK: tl.constexpr, PAD_DV: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    COUNT: tl.constexpr, LEAST: tl.constexpr, PRECISION: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    sequence, nth, shares = item, 0, 1
    if not SINGLE:
        all_shares = _shares(cu_seqlens, lengths, count, room, most, window, WINDOW, COUNT, LEAST)
        before = tl.cumsum(all_shares, 0) <= item
        sequence = tl.sum(before.to(tl.int32), 0)
        nth = item - tl.sum(tl.where(before, all_shares, 0), 0)
        this = tl.arange(0, COUNT) == sequence
        shares = tl.sum(tl.where(this, all_shares, 0), 0)
    there = sequence < count
    token = tl.load(cu_seqlens + sequence, mask=there, other=0)
    stop = tl.load(cu_seqlens + sequence + 1, mask=there, other=0)
    length = tl.load(lengths + sequence, mask=there, other=0)
    if LATE:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if stop - token != 1:
        return
    first = 0
    if WINDOW:
        first = tl.maximum(length - window, 0) // BLOCK * BLOCK
    share = tl.cdiv(tl.cdiv(length - first, BLOCK), shares) * BLOCK
    begin = first + nth * share
    end = tl.minimum(begin + share, length)

    row = tl.arange(0, ROWS)
    head = kv_head * GROUP + row
    dk = tl.arange(0, PAD_DK)
    dv = tl.arange(0, PAD_DV)
    mine = row < GROUP
    q_tile = tl.load(
        q + token.to(tl.int64) * q_stride_t + head[:, None] * q_stride_h + dk[None, :],
        mask=mine[:, None] & (dk < DK)[None, :], other=0.0,
    )  # fmt: skip
    last = tl.full([ROWS], 0, tl.int32) + length - 1
    plain = begin
    if not WINDOW:
        plain = begin + tl.maximum(end - begin, 0) // BLOCK * BLOCK
    acc, top, total = attend_keys(
        q_tile, last, begin, plain, end, table + sequence.to(tl.int64) * table_stride,
        keys + kv_head * head_stride_k, values + kv_head * head_stride_v,
        slot_stride_k, slot_stride_v, scale, softcap, window,
        WINDOW, SOFTCAP, PAGE, DK, DV, PAD_DK, PAD_DV, BLOCK, PRECISION,
    )  # fmt: skip

    stored = mine[:, None] & (dv < DV)[None, :]
    if shares == 1:
        sink = tl.zeros([ROWS], tl.float32)
        if SINKS:
            sink = tl.load(sinks + head, mask=mine, other=0.0).to(tl.float32)
        result = finish(acc, top, total, sink, SINKS)
        row_out = out + token.to(tl.int64) * out_stride_t
        target = row_out + head[:, None] * out_stride_h + dv[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=stored)
    elif not SINGLE:
        at = item * (tl.num_programs(0) * GROUP) + head
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(parts + at[:, None].to(tl.int64) * DV + dv[None, :], result, mask=stored)
        lse = tl.where(total == 0.0, float("-inf"), top + tl.log2(total))
        tl.store(part_lse + at, lse, mask=mine)


@triton.jit(do_not_specialize=["window", "count", "room", "most"])
def _join_kernel(
    parts, part_lse, lengths, cu_seqlens, sinks, out, window, count, room, most,
    out_stride_t, out_stride_h,
    MOST: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, DV: tl.constexpr,
    PAD_DV: tl.constexpr, COUNT: tl.constexpr, LEAST: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    sequence = tl.program_id(1)
    token = tl.load(cu_seqlens + sequence)
    all_shares = _shares(cu_seqlens, lengths, count, room, most, window, WINDOW, COUNT, LEAST)
    n = tl.arange(0, COUNT)
    first = tl.sum(tl.where(n < sequence, all_shares, 0), 0)
    shares = tl.sum(tl.where(n == sequence, all_shares, 0), 0)
    if LATE:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if shares <= 1:
        return
    nth = tl.arange(0, MOST)
    dv = tl.arange(0, PAD_DV)
    at = (first + nth) * tl.num_programs(0) + head
    lse = tl.load(part_lse + at, mask=nth < shares, other=float("-inf"))
    top = tl.max(lse, 0)
    sink = 0.0
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
    floor = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(lse - floor)
    part = tl.load(
        parts + at[:, None].to(tl.int64) * DV + dv[None, :],
        mask=(weights > 0)[:, None] & (dv < DV)[None, :], other=0.0,
    )  # fmt: skip
    total = tl.sum(weights, 0)
    if SINKS:
        total += tl.exp2(sink - floor)
    result = tl.sum(part * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    target = out + token.to(tl.int64) * out_stride_t + head * out_stride_h + dv
    tl.store(target, result.to(out.dtype.element_ty), mask=dv < DV)


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """How a launch is cut; found by measuring."""

    block: int
    splits: int
    """The most programs that may share the keys of one sequence; a power of two."""
    warps: int
    stages: int
    registers: int | None = None
    """The most a thread may take, so that as many programs as are wanted fit a processor."""


def decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    table: Tensor,
    lengths: Tensor,
    scores: ScoreParams,
    out: Tensor,
    tiles: DecodeTiles,
) -> None:
    """Fill the rows of `out` that belong to sequences with a single query."""
    heads, dk = q.shape[1:]
    page, kv_heads, dv = values.shape[1:]
    count = table.shape[0]
    group = heads // kv_heads
    single = tiles.splits == 1
    room = programs_at_once(kv_heads, q.device)
    items = count if single else count + room
    parts = out if single else out.new_empty(items * heads, dv, dtype=torch.float32)
    lse = out if single else out.new_empty(items * heads, dtype=torch.float32)
    sinks = out if scores.sinks is None else scores.sinks
    window, windowed = scores.window or 0, scores.window is not None
    late = supports_pdl(q.device)
    shared = {
        "WINDOW": windowed,
        "SINKS": scores.sinks is not None,
        "DV": dv,
        "PAD_DV": padded(dv),
        "COUNT": 1 if single else 64 if count <= 64 else max(256, triton.next_power_of_2(count)),
        "LEAST": LEAST_SHARE,
        "LATE": late,
        "launch_pdl": late,
    }
    _decode_kernel[(kv_heads, items)](
        q, keys, values, table, lengths, cu_seqlens, sinks, out, parts, lse,
        scores.scale, scores.softcap or 1.0, window, count, room, tiles.splits,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), table.stride(0),
        keys.stride(1), keys.stride(2), values.stride(1), values.stride(2),
        GROUP=group, SINGLE=single, SOFTCAP=scores.softcap is not None, PAGE=page,
        DK=dk, PAD_DK=padded(dk), ROWS=max(16, triton.next_power_of_2(group)), BLOCK=tiles.block,
        PRECISION=precision(q), num_warps=tiles.warps, num_stages=tiles.stages,
        maxnreg=tiles.registers, **shared,
    )  # fmt: skip
    if not single:
        _join_kernel[(heads, count)](
            parts, lse, lengths, cu_seqlens, sinks, out, window, count, room, tiles.splits,
            out.stride(0), out.stride(1), MOST=tiles.splits,
            num_warps=1 if tiles.splits * padded(dv) <= 1024 else 4, **shared,
        )  # fmt: skip


def programs_at_once(kv_heads: int, device: torch.device) -> int:
    """How many programs of one kv head run at once: with those of all, four on every processor."""
    return max(4 * sm_count(device) // kv_heads, 1)


@cache
def supports_pdl(device: torch.device) -> bool:
    """Whether kernels may be launched before the one they wait for is done."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def sm_count(device: torch.device) -> int:
    """Multiprocessors to keep busy; on a CPU, where kernels are interpreted, a few."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def padded(dim: int) -> int:
    """The size of a tile that holds a head dim."""
    return max(16, triton.next_power_of_2(dim))


def precision(q: Tensor) -> str:
    """Full products for fp32 inputs; it has no meaning for narrower ones."""
    return "ieee" if q.dtype == torch.float32 else "tf32"
