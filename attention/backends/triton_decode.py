"""Decode: one query per sequence against its pages, memory-bound, split over the keys.

    program (kv head, split, sequence): the group's query heads are the rows of a small product;
    the keys of a sequence are shared out evenly over the splits by its real length, on the device

With one split the result is written directly; with more, a second kernel joins the parts. Sequences
with another number of queries than one are left to the prefill kernel.

Where the device can (LATE), a kernel is launched while the one before it ends: it reads where its
sequence lies, which the host sent long before, and then waits for queries and keys.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .ask import Scores
from .triton_tile import finish, take_in


@triton.jit(do_not_specialize=["window", "scale", "softcap", "table_stride"])
def _decode_kernel(
    q, keys, values, table, lengths, cu_seqlens, sinks, out, parts, part_lse,
    scale, softcap, window,
    q_stride_t, q_stride_h, out_stride_t, out_stride_h, table_stride,
    slot_stride_k, head_stride_k, slot_stride_v, head_stride_v,
    GROUP: tl.constexpr, SINGLE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, PAGE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    PAD_DK: tl.constexpr, PAD_DV: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    sequence = tl.program_id(2)
    token = tl.load(cu_seqlens + sequence)
    stop = tl.load(cu_seqlens + sequence + 1)
    length = tl.load(lengths + sequence)
    if LATE:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if stop - token != 1:
        return
    first = 0
    if WINDOW:
        first = tl.maximum(length - window, 0) // BLOCK * BLOCK
    share = tl.cdiv(tl.cdiv(length - first, BLOCK), splits) * BLOCK
    begin = first + split * share
    end = tl.minimum(begin + share, length)

    row = tl.arange(0, ROWS)
    head = kv_head * GROUP + row
    dk = tl.arange(0, PAD_DK)
    dv = tl.arange(0, PAD_DV)
    mine = row < GROUP
    q_tile = tl.load(
        q + token * q_stride_t + head[:, None] * q_stride_h + dk[None, :],
        mask=mine[:, None] & (dk < DK)[None, :], other=0.0,
    )  # fmt: skip
    last = tl.full([ROWS], 0, tl.int32) + length - 1
    plain = begin
    if not WINDOW:
        plain = begin + tl.maximum(end - begin, 0) // BLOCK * BLOCK
    acc, top, total = take_in(
        q_tile, last, begin, plain, end, table + sequence.to(tl.int64) * table_stride,
        keys + kv_head * head_stride_k, values + kv_head * head_stride_v,
        slot_stride_k, slot_stride_v, scale, softcap, window,
        WINDOW, SOFTCAP, PAGE, DK, DV, PAD_DK, PAD_DV, BLOCK, PRECISION,
    )  # fmt: skip

    stored = mine[:, None] & (dv < DV)[None, :]
    if SINGLE:
        sink = tl.zeros([ROWS], tl.float32)
        if SINKS:
            sink = tl.load(sinks + head, mask=mine, other=0.0).to(tl.float32)
        result = finish(acc, top, total, sink, SINKS)
        at = out + token * out_stride_t + head[:, None] * out_stride_h + dv[None, :]
        tl.store(at, result.to(out.dtype.element_ty), mask=stored)
    else:
        heads = tl.num_programs(0) * GROUP
        at = (sequence * heads + head) * splits + split
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(parts + at[:, None].to(tl.int64) * DV + dv[None, :], result, mask=stored)
        lse = tl.where(total == 0.0, float("-inf"), top + tl.log2(total))
        tl.store(part_lse + at, lse, mask=mine)


@triton.jit
def _join_kernel(
    parts, part_lse, cu_seqlens, sinks, out, out_stride_t, out_stride_h,
    SPLITS: tl.constexpr, SINKS: tl.constexpr, DV: tl.constexpr, PAD_DV: tl.constexpr,
    LATE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    sequence = tl.program_id(1)
    token = tl.load(cu_seqlens + sequence)
    stop = tl.load(cu_seqlens + sequence + 1)
    if LATE:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if stop - token != 1:
        return
    split = tl.arange(0, SPLITS)
    dv = tl.arange(0, PAD_DV)
    at = (sequence * tl.num_programs(0) + head) * SPLITS + split
    lse = tl.load(part_lse + at)
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
    target = out + token * out_stride_t + head * out_stride_h + dv
    tl.store(target, result.to(out.dtype.element_ty), mask=dv < DV)


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """How a launch is cut; found by measuring."""

    block: int
    splits: int
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
    scores: Scores,
    out: Tensor,
    tiles: DecodeTiles,
) -> None:
    """Fill the rows of `out` that belong to sequences with a single query."""
    heads, dk = q.shape[1:]
    page, kv_heads, dv = values.shape[1:]
    count = table.shape[0]
    group = heads // kv_heads
    single = tiles.splits == 1
    parts = out if single else out.new_empty(count * heads * tiles.splits, dv, dtype=torch.float32)
    lse = out if single else out.new_empty(count * heads * tiles.splits, dtype=torch.float32)
    sinks = out if scores.sinks is None else scores.sinks
    late = launches_early(q.device)
    _decode_kernel[(kv_heads, tiles.splits, count)](
        q, keys, values, table, lengths, cu_seqlens, sinks, out, parts, lse,
        scores.scale, scores.softcap or 1.0, scores.window or 0,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), table.stride(0),
        keys.stride(1), keys.stride(2), values.stride(1), values.stride(2),
        GROUP=group, SINGLE=single, WINDOW=scores.window is not None,
        SOFTCAP=scores.softcap is not None, SINKS=scores.sinks is not None,
        PAGE=page, DK=dk, DV=dv, PAD_DK=padded(dk), PAD_DV=padded(dv),
        ROWS=max(16, triton.next_power_of_2(group)), BLOCK=tiles.block,
        PRECISION=precision(q), LATE=late, launch_pdl=late,
        num_warps=tiles.warps, num_stages=tiles.stages, maxnreg=tiles.registers,
    )  # fmt: skip
    if not single:
        _join_kernel[(heads, count)](
            parts, lse, cu_seqlens, sinks, out, out.stride(0), out.stride(1),
            SPLITS=tiles.splits, SINKS=scores.sinks is not None, DV=dv, PAD_DV=padded(dv),
            LATE=late, launch_pdl=late, num_warps=1 if tiles.splits * padded(dv) <= 1024 else 4,
        )  # fmt: skip


@cache
def launches_early(device: torch.device) -> bool:
    """Whether kernels may be launched before the one they wait for is done."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def processors(device: torch.device) -> int:
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
