"""What both Triton kernels share: a tile of queries takes in the keys of a sequence, in pages.

    pages   ▒▒▒▒ of the next block are looked up while
    block   ████ of keys and values meets the tile: so their loads can be on the way blocks ahead

Softmax is kept running, in base 2: `top` is the largest score a row has seen, `total` the sum of
its weights, `acc` its weighted values, the last two relative to `top`.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend_keys(
    q, last, begin, plain, end, table_row, keys, values, slot_stride_k, slot_stride_v,
    scale, softcap, window,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PAGE: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, PAD_DK: tl.constexpr, PAD_DV: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Let rows q [M, PAD_DK], each seeing keys up to last [M], take in keys [begin, end).

    Bounds but `end` are multiples of BLOCK. Every row sees all keys before `plain`, so that nothing
    is masked there; keys at or beyond `end` are not read.
    """
    acc = tl.zeros([q.shape[0], PAD_DV], tl.float32)
    top = tl.full([q.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    page = _pages_of(table_row, begin, plain, False, PAGE, BLOCK)
    for key in range(begin, plain, BLOCK):
        ahead = _pages_of(table_row, key + BLOCK, plain, False, PAGE, BLOCK)
        acc, top, total = _block_step(
            q, acc, top, total, last, key, end, page, keys, values,
            slot_stride_k, slot_stride_v, scale, softcap, window,
            False, WINDOW, SOFTCAP, PAGE, DK, DV, PAD_DK, PAD_DV, BLOCK, PRECISION,
        )  # fmt: skip
        page = ahead
    page = _pages_of(table_row, plain, end, True, PAGE, BLOCK)
    for key in range(plain, end, BLOCK):
        ahead = _pages_of(table_row, key + BLOCK, end, True, PAGE, BLOCK)
        acc, top, total = _block_step(
            q, acc, top, total, last, key, end, page, keys, values,
            slot_stride_k, slot_stride_v, scale, softcap, window,
            True, WINDOW, SOFTCAP, PAGE, DK, DV, PAD_DK, PAD_DV, BLOCK, PRECISION,
        )  # fmt: skip
        page = ahead
    return acc, top, total


@triton.jit
def _pages_of(
    table_row, first_key, end, PARTLY: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr
):
    """Where keys [first_key, +BLOCK) lie: one page if it holds them all, else one for each key.

    The table is not read for keys at or beyond `end`; only PARTLY may that be within the block.
    """
    nth = tl.arange(0, BLOCK)
    read = first_key < end
    if PAGE % BLOCK == 0:
        at = table_row + first_key // PAGE
    else:
        if BLOCK % PAGE == 0:
            at = table_row + first_key // PAGE + nth // PAGE
        else:
            at = table_row + (first_key + nth) // PAGE
        read = nth < end - first_key if PARTLY else tl.full([BLOCK], 1, tl.int1) & read
    return tl.load(at, mask=read, other=0)


@triton.jit
def _in_page(first_key, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Places of keys [first_key, +BLOCK) inside their pages, as (scalar, [BLOCK]) to be added.

    The second does not change from block to block where pages and blocks fit into each other.
    """
    nth = tl.arange(0, BLOCK)
    if PAGE % BLOCK == 0:
        first, rest = first_key % PAGE, nth
    elif BLOCK % PAGE == 0:
        first, rest = 0, nth % PAGE
    else:
        first, rest = 0, (first_key + nth) % PAGE
    return first, rest


@triton.jit
def _block_step(
    q, acc, top, total, last, first_key, end, page, keys, values,
    slot_stride_k, slot_stride_v, scale, softcap, window,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PAGE: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, PAD_DK: tl.constexpr, PAD_DV: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take in keys [first_key, +BLOCK), which lie in `page`."""
    LOG2E: tl.constexpr = 1.4426950408889634
    nth = tl.arange(0, BLOCK)
    inside = nth < end - first_key
    dk = tl.arange(0, PAD_DK)
    dv = tl.arange(0, PAD_DV)
    page = page.to(tl.int64)
    first, rest = _in_page(first_key, PAGE, BLOCK)
    from_k = keys + (page * (PAGE * slot_stride_k) + first * slot_stride_k)
    from_v = values + (page * (PAGE * slot_stride_v) + first * slot_stride_v)
    if PAGE % BLOCK != 0:
        from_k, from_v = from_k[None, :], from_v[:, None]
    at_k = from_k + (rest[None, :] * slot_stride_k + dk[:, None])
    at_v = from_v + (rest[:, None] * slot_stride_v + dv[None, :])
    # values past the end are masked, not only their weights: a page may hold another request's NaN
    if MASKED:
        k = tl.load(at_k, mask=inside[None, :] & (dk < DK)[:, None], other=0.0)
        v = tl.load(at_v, mask=inside[:, None] & (dv < DV)[None, :], other=0.0)
    else:
        k = tl.load(at_k) if DK == PAD_DK else tl.load(at_k, mask=(dk < DK)[:, None], other=0.0)
        v = tl.load(at_v) if DV == PAD_DV else tl.load(at_v, mask=(dv < DV)[None, :], other=0.0)
    s = tl.dot(q, k, input_precision=PRECISION)
    if SOFTCAP:
        s = s * (scale / softcap)
        s = softcap * LOG2E * (1.0 - 2.0 / (tl.exp2(s * (2.0 * LOG2E)) + 1.0))
    else:
        s = s * (scale * LOG2E)
    if MASKED:
        place = first_key + nth
        seen = inside[None, :] & (place[None, :] <= last[:, None])
        if WINDOW:
            seen = seen & (place[None, :] > last[:, None] - window)
        s = tl.where(seen, s, float("-inf"))
    return online_softmax(s, v, acc, top, total, PRECISION)


@triton.jit
def online_softmax(s, v, acc, top, total, PRECISION: tl.constexpr):
    """Add values [BLOCK, PAD_DV] to the running sums, by scores s [M, BLOCK] in powers of two."""
    new_top = tl.maximum(top, tl.max(s, 1))
    floor = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(s - floor[:, None])
    fade = tl.exp2(top - floor)
    total = total * fade + tl.sum(weights, 1)
    acc = acc * fade[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, new_top, total


@triton.jit
def finish(acc, top, total, sink, SINKS: tl.constexpr):
    """Turn the running sums into the output; a sink [M] takes its share of the weight."""
    if SINKS:
        sink2 = sink * 1.4426950408889634
        new_top = tl.maximum(top, sink2)
        acc = acc * tl.exp2(top - new_top)[:, None]
        total = total * tl.exp2(top - new_top) + tl.exp2(sink2 - new_top)
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]
