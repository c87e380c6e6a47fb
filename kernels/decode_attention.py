"""Attention of a decode step, from the parts of the projections to its output.

    parts [S, M, (H + 2 Hkv) D] ─▶ norms, rotary ─┬─▶ the new key and value, into their slot
                                                  └─▶ queries ─▶ meet the pages ─▶ out [M, H, D]

`fused_decode_attention` is all of it in one kernel, for few sequences; `place` is the first half, for many.
Program (kv head, split, sequence): the group's queries and their key are the rows of one tile. The
first split takes the new token, straight from the parts; the keys before it are shared out over all
splits, and whoever ends last joins their results.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention import Pages
from .attention_tile import online_softmax
from .paged_decode import DecodeTiles, padded, precision, sm_count


@dataclass(frozen=True, slots=True, eq=False)
class QKTransform:
    """How queries and keys are made ready: bias and norms, if any, and the angles of positions."""

    cos: Tensor
    """[positions, D]."""
    sin: Tensor
    bias: Tensor | None = None
    q_gain: Tensor | None = None
    k_gain: Tensor | None = None
    eps: float = 0.0


@triton.jit
def _summed(
    parts, bias, rows, row, at, inside,
    wide: tl.constexpr, PARTS: tl.constexpr, kind: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Sum of the parts at columns `at`, rounded as a product's result is."""
    value = tl.zeros(at.shape, tl.float32)
    for split in tl.static_range(PARTS):
        where = parts + (split * rows + row) * wide + at
        value += tl.load(where, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    return value.to(kind).to(tl.float32)


@triton.jit
def _turned(
    parts, bias, cos_d, sin_d, q_gain, k_gain, eps, rows, row, kv, line, d,
    WIDE: tl.constexpr, PARTS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """The rows of a group, normed and turned: line GROUP is the key, those before are queries."""
    near = (d < D)[None, :]
    is_q = (line < GROUP)[:, None]
    inside = (line <= GROUP)[:, None] & near
    at = tl.where(is_q, kv * GROUP + line[:, None], HEADS + kv) * D
    partner = tl.where(d < D // 2, d + D // 2, d - D // 2)[None, :]
    own = _summed(parts, bias, rows, row, at + d[None, :], inside, WIDE, PARTS, kind, BIAS)
    other = _summed(parts, bias, rows, row, at + partner, inside, WIDE, PARTS, kind, BIAS)
    if NORM:
        size = tl.rsqrt(tl.sum(own * own, 1) / D + eps)[:, None]
        q_own = tl.load(q_gain + d[None, :], mask=near, other=0.0).to(tl.float32)
        k_own = tl.load(k_gain + d[None, :], mask=near, other=0.0).to(tl.float32)
        q_other = tl.load(q_gain + partner, mask=near, other=0.0).to(tl.float32)
        k_other = tl.load(k_gain + partner, mask=near, other=0.0).to(tl.float32)
        own = (own * size).to(kind).to(tl.float32) * tl.where(is_q, q_own, k_own)
        other = (other * size).to(kind).to(tl.float32) * tl.where(is_q, q_other, k_other)
        own, other = own.to(kind).to(tl.float32), other.to(kind).to(tl.float32)
    sign = tl.where(d < D // 2, -1.0, 1.0)[None, :]
    return (own * cos_d[None, :] + other * sin_d[None, :] * sign).to(kind)


@triton.jit(do_not_specialize=["rows"])
def _place(
    parts, bias, cos, sin, q_gain, k_gain, keys, values, slots, lengths, out, eps, rows,
    cos_stride, slot_stride_k, slot_stride_v,
    PARTS: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr,
    PAD: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    LATE: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = HEADS // KV
    WIDE: tl.constexpr = (HEADS + 2 * KV) * D
    kv = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    kind: tl.constexpr = out.dtype.element_ty
    line = tl.arange(0, ROWS)
    d = tl.arange(0, PAD)
    near = d < D
    position = tl.load(lengths + row) - 1
    slot = tl.load(slots + row)
    cos_d = tl.load(cos + position * cos_stride + d, mask=near, other=0.0).to(tl.float32)
    sin_d = tl.load(sin + position * cos_stride + d, mask=near, other=0.0).to(tl.float32)
    if LATE:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    turned = _turned(
        parts, bias, cos_d, sin_d, q_gain, k_gain, eps, rows, row, kv, line, d,
        WIDE, PARTS, HEADS, GROUP, D, NORM, BIAS, kind,
    )  # fmt: skip
    query = row * HEADS + kv * GROUP + line
    queries = (line < GROUP)[:, None] & near[None, :]
    tl.store(out + query[:, None] * D + d[None, :], turned, mask=queries)
    if slot >= 0:
        to_k = keys + slot * slot_stride_k + kv * D + d[None, :] + tl.zeros_like(line)[:, None]
        tl.store(to_k, turned, mask=(line == GROUP)[:, None] & near[None, :])
        from_v = (HEADS + KV + kv) * D + d
        value = _summed(parts, bias, rows, row, from_v, near, WIDE, PARTS, kind, BIAS)
        tl.store(values + slot * slot_stride_v + kv * D + d, value.to(kind), mask=near)


@triton.jit(do_not_specialize=["rows", "table_stride"])
def _attend(
    parts, bias, cos, sin, q_gain, k_gain, keys, values, slots, lengths, out, eps, rows,
    cos_stride, slot_stride_k, slot_stride_v,
    table, shares, share_lse, ended, scale, table_stride,
    PARTS: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr,
    PAD: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    LATE: tl.constexpr,
    SPLITS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = HEADS // KV
    WIDE: tl.constexpr = (HEADS + 2 * KV) * D
    kv = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    kind: tl.constexpr = out.dtype.element_ty
    line = tl.arange(0, ROWS)
    d = tl.arange(0, PAD)
    near = d < D
    # What the host sent or the step began with is there; the parts are still on their way.
    before = tl.load(lengths + row) - 1
    slot = tl.load(slots + row)
    cos_d = tl.load(cos + before * cos_stride + d, mask=near, other=0.0).to(tl.float32)
    sin_d = tl.load(sin + before * cos_stride + d, mask=near, other=0.0).to(tl.float32)
    if LATE:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    turned = _turned(
        parts, bias, cos_d, sin_d, q_gain, k_gain, eps, rows, row, kv, line, d,
        WIDE, PARTS, HEADS, GROUP, D, NORM, BIAS, kind,
    )  # fmt: skip

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PAD], tl.float32)
    if split == 0:
        exact = turned.to(tl.float32)
        key = tl.sum(tl.where((line == GROUP)[:, None], exact, 0.0), 0)
        from_v = (HEADS + KV + kv) * D + d
        value = _summed(parts, bias, rows, row, from_v, near, WIDE, PARTS, kind, BIAS)
        top = tl.sum(exact * key[None, :], 1) * (scale * 1.4426950408889634)
        total = tl.full([ROWS], 1.0, tl.float32)
        acc += value[None, :]
        if slot >= 0:
            tl.store(keys + slot * slot_stride_k + kv * D + d, key.to(kind), mask=near)
            tl.store(values + slot * slot_stride_v + kv * D + d, value.to(kind), mask=near)

    acc, top, total = _meet_pages(
        turned, acc, top, total, before, split, table + row * table_stride, keys + kv * D,
        values + kv * D, slot_stride_k, slot_stride_v, scale,
        D, PAD, SPLITS, PAGE, BLOCK, PRECISION,
    )  # fmt: skip
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    stored = (line < GROUP)[:, None] & near[None, :]
    query = row * HEADS + kv * GROUP + line
    to = out + query[:, None] * D + d[None, :]
    if SPLITS == 1:
        tl.store(to, result.to(kind), mask=stored)
    else:
        tl.store(shares + (query * SPLITS + split)[:, None] * D + d[None, :], result, mask=stored)
        lse = tl.where(total == 0.0, float("-inf"), top + tl.log2(total))
        tl.store(share_lse + query * SPLITS + split, lse, mask=line < GROUP)
        tl.debug_barrier()
        counter = ended + row * KV + kv
        if tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1:
            _join(shares, share_lse, query, line, d, to, stored, SPLITS, GROUP, D, PAD, ROWS)
            tl.store(counter, 0)


@triton.jit
def _meet_pages(
    turned, acc, top, total, before, split, pages, keys, values, slot_stride_k, slot_stride_v,
    scale,
    D: tl.constexpr, PAD: tl.constexpr, SPLITS: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Let the rows take in this split's share of the keys before the new one."""
    share = tl.cdiv(tl.cdiv(before, BLOCK), SPLITS) * BLOCK
    begin = split * share
    end = tl.minimum(begin + share, before)
    plain = begin + tl.maximum(end - begin, 0) // BLOCK * BLOCK
    for first in range(begin, plain, BLOCK):
        acc, top, total = _take_in(
            turned, acc, top, total, first, end, pages, keys, values, slot_stride_k,
            slot_stride_v, scale, False, D, PAD, PAGE, BLOCK, PRECISION,
        )  # fmt: skip
    for first in range(plain, end, BLOCK):
        acc, top, total = _take_in(
            turned, acc, top, total, first, end, pages, keys, values, slot_stride_k,
            slot_stride_v, scale, True, D, PAD, PAGE, BLOCK, PRECISION,
        )  # fmt: skip
    return acc, top, total


@triton.jit
def _take_in(
    turned, acc, top, total, first, end, pages, keys, values, slot_stride_k, slot_stride_v, scale,
    MASKED: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Let the rows take in keys [first, +BLOCK); MASKED: but none at or beyond `end`.

    Attention's kernels look up their pages a block ahead, which pays in long loops; a split here
    has a block or two.
    """
    place = first + tl.arange(0, BLOCK)
    inside = place < end
    if PAGE % BLOCK == 0:  # the whole block lies in one page
        page = tl.load(pages + first // PAGE).to(tl.int64)
        slot = page * PAGE + first % PAGE + tl.arange(0, BLOCK)
    else:
        page = tl.load(pages + place // PAGE, mask=inside, other=0).to(tl.int64)
        slot = page * PAGE + place % PAGE
    d = tl.arange(0, PAD)
    at_k = keys + slot[None, :] * slot_stride_k + d[:, None]
    at_v = values + slot[:, None] * slot_stride_v + d[None, :]
    # values past the end are masked, not only their weights: a page may hold another request's NaN
    if MASKED:
        k = tl.load(at_k, mask=inside[None, :] & (d < D)[:, None], other=0.0)
        v = tl.load(at_v, mask=inside[:, None] & (d < D)[None, :], other=0.0)
    else:
        k = tl.load(at_k) if D == PAD else tl.load(at_k, mask=(d < D)[:, None], other=0.0)
        v = tl.load(at_v) if D == PAD else tl.load(at_v, mask=(d < D)[None, :], other=0.0)
    s = tl.dot(turned, k, input_precision=PRECISION) * (scale * 1.4426950408889634)
    if MASKED:
        s = tl.where(inside[None, :], s, float("-inf"))
    return online_softmax(s, v, acc, top, total, PRECISION)


@triton.jit
def _join(
    shares, share_lse, query, line, d, to, stored,
    SPLITS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Weigh the splits' results by what each saw; past the first-level cache, which may be old."""
    every = tl.arange(0, SPLITS)
    at = query[:, None] * SPLITS + every[None, :]
    mine = (line < GROUP)[:, None]
    lse = tl.load(share_lse + at, mask=mine, other=float("-inf"), cache_modifier=".cg")
    top = tl.max(lse, 1)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(lse - top[:, None]), 1)
    acc = tl.zeros([ROWS, PAD], tl.float32)
    for split in tl.static_range(SPLITS):
        one = tl.load(
            share_lse + query * SPLITS + split, mask=line < GROUP, other=float("-inf"),
            cache_modifier=".cg",
        )  # fmt: skip
        from_share = shares + (query * SPLITS + split)[:, None] * D + d[None, :]
        part = tl.load(from_share, mask=stored, other=0.0, cache_modifier=".cg")
        acc += part * tl.exp2(one - top)[:, None]
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(to, result.to(to.dtype.element_ty), mask=stored)


def fused_decode_attention(
    parts: Tensor,
    turn: QKTransform,
    pages: Pages,
    layer: int,
    heads: int,
    scale: float,
    tiles: DecodeTiles,
    ended: Tensor,
    late: bool,
) -> Tensor:
    """Attend the tokens whose projections are `parts`; their keys and values go to their slots.

    Args:
        ended: zeros [M, Hkv], and zeros again afterwards.
    """
    rows = parts.shape[1]
    page, kv, dim = pages.cache.layer(layer)[0].shape[1:]
    out = torch.empty(rows, heads, dim, dtype=turn.cos.dtype, device=parts.device)
    shape = (rows * heads * tiles.splits, dim) if tiles.splits > 1 else (0, 0)
    shares = torch.empty(shape, dtype=torch.float32, device=parts.device)
    lse = torch.empty(shape[0], dtype=torch.float32, device=parts.device)
    given, sizes = _given(parts, turn, pages, layer, out, late)
    _attend[(kv, tiles.splits, rows)](
        *given, pages.table, shares, lse, ended, scale, pages.table.stride(0), **sizes,
        SPLITS=tiles.splits, PAGE=page, BLOCK=tiles.block, PRECISION=precision(out),
        launch_pdl=late, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


def place(
    parts: Tensor, turn: QKTransform, pages: Pages, layer: int, heads: int, late: bool
) -> Tensor:
    """Put the keys and values of `parts` into their slots, and return the queries [M, H, D]."""
    rows = parts.shape[1]
    kv, dim = pages.cache.layer(layer)[0].shape[2:]
    out = torch.empty(rows, heads, dim, dtype=turn.cos.dtype, device=parts.device)
    given, sizes = _given(parts, turn, pages, layer, out, late)
    _place[(kv, rows)](*given, **sizes, launch_pdl=late, num_warps=1)
    return out


def _given(
    parts: Tensor, turn: QKTransform, pages: Pages, layer: int, out: Tensor, late: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What both kernels take: tensors and strides in order, constants by name."""
    keys, values = pages.cache.layer(layer)
    kv, dim = keys.shape[2:]
    heads = out.shape[1]
    extras = (turn.bias, turn.q_gain, turn.k_gain)
    bias, q_gain, k_gain = (turn.cos if t is None else t for t in extras)
    given = (
        parts, bias, turn.cos, turn.sin, q_gain, k_gain, keys, values, pages.kv_slots, pages.lengths,
        out, turn.eps, parts.shape[1], turn.cos.stride(0), keys.stride(1), values.stride(1),
    )  # fmt: skip
    sizes = {
        "PARTS": len(parts),
        "HEADS": heads,
        "KV": kv,
        "D": dim,
        "PAD": padded(dim),
        "ROWS": max(16, triton.next_power_of_2(heads // kv + 1)),
        "NORM": turn.q_gain is not None,
        "BIAS": turn.bias is not None,
        "LATE": late,
    }
    return given, sizes


def attention_tiles(keys: Tensor, rows: int, reach: int) -> DecodeTiles:
    """Four programs per processor where the keys allow it: what an H200 did fastest."""
    wide = padded(keys.shape[3]) * keys.element_size()
    block = 128 if wide <= 128 else 64 if wide <= 256 else 32
    wanted = min(4 * sm_count(keys.device) // (rows * keys.shape[2]), 16, reach // block)
    splits = 1
    while splits * 2 <= wanted:
        splits *= 2
    return DecodeTiles(block, splits, warps=4, stages=4 if wide <= 128 else 3 if wide <= 256 else 2)
