"""Triton functions inside decode and prefill kernels: a tile of queries attends to paged keys.

    pages   ▒▒▒▒ of the next block are looked up while
    block   ████ is computed, so that its loads can be issued blocks ahead

The softmax is computed online, in base 2: `m_i` is the largest score of a row so far, `l_i` the sum
of its weights and `acc` the sum of its weighted values, both relative to `m_i`.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .quantized_kv import dot_operand


@triton.jit
def attend_keys(
    q, acc, m_i, l_i, last_key, start, end, page_table, keys, values, key_scales, value_scales,
    slot_stride_k, slot_stride_v, page_stride_s, scale, softcap, window,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, QUANTIZED: tl.constexpr,
    PAGE_SIZE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Update the running sums by keys [start, end), which q [M, BLOCK_DK] attends to.

    start, end: multiples of BLOCK_N; `end` need not be one if MASKED and no row sees later keys.
    key_scales, value_scales: those of keys and values in 8 bits, if QUANTIZED.
    MASKED: row m sees keys up to last_key[m], all rows up to last_key if it is [1], and of these
        only the last `window` if WINDOW. Otherwise all rows see all keys. Decode is masked
        throughout: a separate loop for the last block costs as much as the masks.
    """
    q_scale = 1.0
    if QUANTIZED:
        q, q_scale = dot_operand(q, keys.dtype.element_ty)
    page = _load_pages(page_table, start, end, MASKED, PAGE_SIZE, BLOCK_N)
    for key in range(start, end, BLOCK_N):
        next_page = _load_pages(page_table, key + BLOCK_N, end, MASKED, PAGE_SIZE, BLOCK_N)
        acc, m_i, l_i = _attend_block(
            q, q_scale, acc, m_i, l_i, last_key, key, end, page, keys, values, key_scales,
            value_scales, slot_stride_k, slot_stride_v, page_stride_s, scale, softcap, window,
            MASKED, WINDOW, SOFTCAP, QUANTIZED, PAGE_SIZE, DK, DV, BLOCK_DK, BLOCK_DV, BLOCK_N,
            PRECISION,
        )  # fmt: skip
        page = next_page
    return acc, m_i, l_i


@triton.jit
def _load_pages(
    page_table, first_key, end, MASKED: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return the pages of keys [first_key, +BLOCK_N): a scalar if one holds all, else [BLOCK_N].

    The table is not read for keys at or beyond `end`, which is inside the block only if MASKED.
    """
    offs_n = tl.arange(0, BLOCK_N)
    mask = first_key < end
    if PAGE_SIZE % BLOCK_N == 0:
        entry = page_table + first_key // PAGE_SIZE
    else:
        if BLOCK_N % PAGE_SIZE == 0:
            entry = page_table + first_key // PAGE_SIZE + offs_n // PAGE_SIZE
        else:
            entry = page_table + (first_key + offs_n) // PAGE_SIZE
        mask = offs_n < end - first_key if MASKED else tl.full([BLOCK_N], 1, tl.int1) & mask
    return tl.load(entry, mask=mask, other=0.0)


@triton.jit
def _attend_block(
    q, q_scale, acc, m_i, l_i, last_key, first_key, end, page, keys, values, key_scales,
    value_scales, slot_stride_k, slot_stride_v, page_stride_s, scale, softcap, window,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, QUANTIZED: tl.constexpr,
    PAGE_SIZE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to keys [first_key, +BLOCK_N), which are in `page`."""
    LOG2E: tl.constexpr = 1.4426950408889634
    offs_n = tl.arange(0, BLOCK_N)
    offs_dk = tl.arange(0, BLOCK_DK)
    offs_dv = tl.arange(0, BLOCK_DV)
    slot = page.to(tl.int64) * PAGE_SIZE
    if PAGE_SIZE % BLOCK_N == 0:  # one page holds the block: the same offsets for every block
        slot += first_key % PAGE_SIZE
        k_ptr = keys + slot * slot_stride_k + (offs_n[None, :] * slot_stride_k + offs_dk[:, None])
        v_ptr = values + slot * slot_stride_v + (offs_n[:, None] * slot_stride_v + offs_dv[None, :])
    else:
        slot += (first_key + offs_n) % PAGE_SIZE
        k_ptr = keys + slot[None, :] * slot_stride_k + offs_dk[:, None]
        v_ptr = values + slot[:, None] * slot_stride_v + offs_dv[None, :]
    # Values past the end are masked, not only their weights: a page may hold a stale NaN.
    if MASKED:
        mask_n = offs_n < end - first_key
        k = tl.load(k_ptr, mask=mask_n[None, :] & (offs_dk < DK)[:, None], other=0.0)
        v = tl.load(v_ptr, mask=mask_n[:, None] & (offs_dv < DV)[None, :], other=0.0)
    else:
        if DK == BLOCK_DK:
            k = tl.load(k_ptr)
        else:
            k = tl.load(k_ptr, mask=(offs_dk < DK)[:, None], other=0.0)
        if DV == BLOCK_DV:
            v = tl.load(v_ptr)
        else:
            v = tl.load(v_ptr, mask=(offs_dv < DV)[None, :], other=0.0)
    if QUANTIZED:
        offset = page.to(tl.int64) * page_stride_s + (first_key + offs_n) % PAGE_SIZE
        mask_s = offs_n < end - first_key
        key_scale = tl.load(key_scales + offset, mask=mask_s, other=0.0).to(tl.float32)
        value_scale = tl.load(value_scales + offset, mask=mask_s, other=0.0).to(tl.float32)
        s = tl.dot(q, k.to(q.dtype), input_precision=PRECISION) * (q_scale * key_scale[None, :])
        v = v.to(q.dtype)
    else:
        value_scale = 1.0
        s = tl.dot(q, k, input_precision=PRECISION)
    scale2 = scale * LOG2E
    if SOFTCAP:
        s = s * (scale / softcap)
        s = softcap * (1.0 - 2.0 / (tl.exp2(s * (2.0 * LOG2E)) + 1.0))
        scale2 = LOG2E
    if MASKED:
        key = first_key + offs_n[None, :]
        visible = key <= last_key[:, None]
        if WINDOW:
            visible = visible & (key > last_key[:, None] - window)
        s = tl.where(visible, s, float("-inf"))
    return _online_softmax(s, scale2, v, value_scale, acc, m_i, l_i, QUANTIZED, PRECISION)


@triton.jit
def _online_softmax(
    s, scale2, v, value_scale, acc, m_i, l_i, QUANTIZED: tl.constexpr, PRECISION: tl.constexpr
):
    """Update the running sums by values v [N, BLOCK_DV] with scores s [M, N].

    Scores times scale2, which is positive, are in base 2; multiplied here, in one operation with
    the subtraction of the maximum.
    """
    m_new = tl.maximum(m_i, tl.max(s, 1) * scale2)
    floor = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * scale2 - floor[:, None])
    alpha = tl.exp2(m_i - floor)
    l_i = l_i * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    if QUANTIZED:  # relative to the largest scale, a weight fits into every dtype
        top = tl.maximum(tl.max(value_scale, 0), 2.0**-120)
        p = p * (value_scale / top)[None, :]
        acc += tl.dot(p.to(v.dtype), v, input_precision=PRECISION) * top
    else:
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, m_new, l_i


@triton.jit
def normalize(acc, m_i, l_i, sink, SINKS: tl.constexpr):
    """Turn the running sums into the output; a sink [M] adds its weight to the denominator."""
    if SINKS:
        sink2 = sink * 1.4426950408889634
        m_new = tl.maximum(m_i, sink2)
        acc = acc * tl.exp2(m_i - m_new)[:, None]
        l_i = l_i * tl.exp2(m_i - m_new) + tl.exp2(sink2 - m_new)
    return acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]


def padded_dim(dim: int) -> int:
    """Return the tile size that holds a head dim.

    >>> padded_dim(80)
    128
    """
    return max(16, triton.next_power_of_2(dim))


def dot_precision(q: Tensor) -> str:
    """Return `tl.dot`'s input precision: no TF32 for fp32 inputs; ignored for narrower ones."""
    return "ieee" if q.dtype == torch.float32 else "tf32"
