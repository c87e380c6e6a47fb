"""The inner step of both Triton kernels: one tile of queries meets one block of keys in pages.

Softmax is kept running, in base 2: `top` is the largest score a row has seen, `total` the sum of
its weights, `acc` its weighted values, the last two relative to `top`.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block_step(
    q,
    acc,
    top,
    total,
    last,
    first_key,
    end,
    table_row,
    keys,
    values,
    slot_stride_k,
    slot_stride_v,
    scale,
    softcap,
    window,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PAGE: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PAD_DK: tl.constexpr,
    PAD_DV: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Let rows q [M, PAD_DK], each seeing keys up to last [M], take in keys [first_key, +BLOCK).

    first_key is a multiple of BLOCK; keys at or beyond `end` are not read.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    place = first_key + tl.arange(0, BLOCK)
    inside = place < end
    if PAGE % BLOCK == 0:  # the whole block lies in one page
        page = tl.load(table_row + first_key // PAGE).to(tl.int64)
        slot = page * PAGE + first_key % PAGE + tl.arange(0, BLOCK)
    else:
        page = tl.load(table_row + place // PAGE, mask=inside, other=0).to(tl.int64)
        slot = page * PAGE + place % PAGE
    dk = tl.arange(0, PAD_DK)
    dv = tl.arange(0, PAD_DV)
    at_k = keys + slot[None, :] * slot_stride_k + dk[:, None]
    at_v = values + slot[:, None] * slot_stride_v + dv[None, :]
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
        seen = inside[None, :] & (place[None, :] <= last[:, None])
        if WINDOW:
            seen = seen & (place[None, :] > last[:, None] - window)
        s = tl.where(seen, s, float("-inf"))
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
