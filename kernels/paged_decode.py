"""Attention over pages for sequences with one query (decode), by split-KV (flash decoding).

    lengths            ▇▇▇▇▇▇▇▇▇▇▇▇ ▇▇ ▇▇▇▇▇ ▇▇      known on the device only
    splits             ▇▇▇▇|▇▇▇▇|▇▇▇▇ ▇▇ ▇▇▇▇▇ ▇▇    one program each, for every kv head

Each program handles one split; the query heads of the group are the rows of its tile. Only
sequences longer than twice an even split are split, so that a batch of similar lengths runs in one
wave and one long sequence does not become the tail. A second kernel combines the splits. Sequences
with more or fewer than one query are skipped: the prefill kernel handles them.

With PDL (programmatic dependent launch) a kernel starts while the previous one ends: it finds its
split from the lengths, which the host sent before the step, and then waits for queries and keys.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_tile import attend_keys, dot_precision, normalize, padded_dim
from .launch import sm_count, supports_pdl

MIN_SPLIT_KEYS = 128
"""Fewest keys that are worth a program."""


@triton.jit
def _num_splits(
    cu_seqlens, lengths, num_seqs, num_programs, max_splits, window,
    WINDOW: tl.constexpr, BLOCK_SEQS: tl.constexpr, MIN_KEYS: tl.constexpr,
):  # fmt: skip
    """Return the splits of each sequence [BLOCK_SEQS]; 0 unless it has exactly one query.

    They sum to at most num_programs + num_seqs, since a split holds at least 1 / num_programs of
    all keys.
    """
    offs = tl.arange(0, BLOCK_SEQS)
    start = tl.load(cu_seqlens + offs, mask=offs < num_seqs, other=0)
    stop = tl.load(cu_seqlens + offs + 1, mask=offs < num_seqs, other=0)
    num_keys = tl.load(lengths + offs, mask=offs < num_seqs, other=0)
    if WINDOW:
        num_keys = tl.minimum(num_keys, window)
    is_decode = stop - start == 1
    total_keys = tl.sum(tl.where(is_decode, num_keys, 0), 0)
    even_split = tl.maximum(tl.cdiv(total_keys, num_programs), MIN_KEYS)
    splits = tl.minimum(tl.maximum(num_keys // even_split, 1), max_splits)
    return tl.where(is_decode, splits, 0)


@triton.jit(
    do_not_specialize=[
        "window", "scale", "softcap", "page_table_stride", "num_seqs", "num_programs", "max_splits",
    ]
)  # fmt: skip
def _decode_kernel(
    q, keys, values, key_scales, value_scales, page_table, lengths, cu_seqlens, sinks, out,
    partial_out, partial_lse,
    scale, softcap, window, num_seqs, num_programs, max_splits,
    q_stride_t, q_stride_h, out_stride_t, out_stride_h, page_table_stride,
    slot_stride_k, head_stride_k, slot_stride_v, head_stride_v, page_stride_s,
    GROUP_SIZE: tl.constexpr, SINGLE_SPLIT: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, QUANTIZED: tl.constexpr,
    PAGE_SIZE: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_SEQS: tl.constexpr, MIN_KEYS: tl.constexpr,
    PRECISION: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    seq, split, num_splits = item, 0, 1
    if not SINGLE_SPLIT:
        all_splits = _num_splits(
            cu_seqlens, lengths, num_seqs, num_programs, max_splits, window,
            WINDOW, BLOCK_SEQS, MIN_KEYS,
        )  # fmt: skip
        before = tl.cumsum(all_splits, 0) <= item
        seq = tl.sum(before.to(tl.int32), 0)
        split = item - tl.sum(tl.where(before, all_splits, 0), 0)
        is_seq = tl.arange(0, BLOCK_SEQS) == seq
        num_splits = tl.sum(tl.where(is_seq, all_splits, 0), 0)
    exists = seq < num_seqs
    token = tl.load(cu_seqlens + seq, mask=exists, other=0)
    next_token = tl.load(cu_seqlens + seq + 1, mask=exists, other=0)
    length = tl.load(lengths + seq, mask=exists, other=0)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if next_token - token != 1:
        return
    first_key = 0
    if WINDOW:
        first_key = tl.maximum(length - window, 0) // BLOCK_N * BLOCK_N
    split_keys = tl.cdiv(tl.cdiv(length - first_key, BLOCK_N), num_splits) * BLOCK_N
    start = first_key + split * split_keys
    end = tl.minimum(start + split_keys, length)

    offs_m = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP_SIZE + offs_m
    offs_dk = tl.arange(0, BLOCK_DK)
    offs_dv = tl.arange(0, BLOCK_DV)
    mask_m = offs_m < GROUP_SIZE
    q_tile = tl.load(
        q + token.to(tl.int64) * q_stride_t + head[:, None] * q_stride_h + offs_dk[None, :],
        mask=mask_m[:, None] & (offs_dk < DK)[None, :], other=0.0,
    )  # fmt: skip
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc, m_i, l_i = attend_keys(
        q_tile, acc, m_i, l_i, tl.full([1], 0, tl.int32) + length - 1, start, end,
        page_table + seq.to(tl.int64) * page_table_stride,
        keys + kv_head * head_stride_k, values + kv_head * head_stride_v,
        key_scales + kv_head * PAGE_SIZE, value_scales + kv_head * PAGE_SIZE,
        slot_stride_k, slot_stride_v, page_stride_s, scale, softcap, window, True, WINDOW, SOFTCAP,
        QUANTIZED, PAGE_SIZE, DK, DV, BLOCK_DK, BLOCK_DV, BLOCK_N, PRECISION,
    )  # fmt: skip

    mask_out = mask_m[:, None] & (offs_dv < DV)[None, :]
    if num_splits == 1:
        sink = tl.zeros([BLOCK_M], tl.float32)
        if SINKS:
            sink = tl.load(sinks + head, mask=mask_m, other=0.0).to(tl.float32)
        result = normalize(acc, m_i, l_i, sink, SINKS)
        out_row = out + token.to(tl.int64) * out_stride_t
        out_ptr = out_row + head[:, None] * out_stride_h + offs_dv[None, :]
        tl.store(out_ptr, result.to(out.dtype.element_ty), mask=mask_out)
    elif not SINGLE_SPLIT:
        row = item * (tl.num_programs(0) * GROUP_SIZE) + head
        result = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
        partial_ptr = partial_out + row[:, None].to(tl.int64) * DV + offs_dv[None, :]
        tl.store(partial_ptr, result, mask=mask_out)
        lse = tl.where(l_i == 0.0, float("-inf"), m_i + tl.log2(l_i))
        tl.store(partial_lse + row, lse, mask=mask_m)


@triton.jit(do_not_specialize=["window", "num_seqs", "num_programs", "max_splits"])
def _combine_kernel(
    partial_out, partial_lse, lengths, cu_seqlens, sinks, out, window, num_seqs, num_programs,
    max_splits, out_stride_t, out_stride_h,
    BLOCK_SPLITS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, DV: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_SEQS: tl.constexpr, MIN_KEYS: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one head of one sequence, weighted by their log-sum-exp."""
    head = tl.program_id(0)
    seq = tl.program_id(1)
    token = tl.load(cu_seqlens + seq)
    all_splits = _num_splits(
        cu_seqlens, lengths, num_seqs, num_programs, max_splits, window,
        WINDOW, BLOCK_SEQS, MIN_KEYS,
    )  # fmt: skip
    offs_seq = tl.arange(0, BLOCK_SEQS)
    first = tl.sum(tl.where(offs_seq < seq, all_splits, 0), 0)
    num_splits = tl.sum(tl.where(offs_seq == seq, all_splits, 0), 0)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if num_splits <= 1:
        return
    split = tl.arange(0, BLOCK_SPLITS)
    offs_dv = tl.arange(0, BLOCK_DV)
    row = (first + split) * tl.num_programs(0) + head
    lse = tl.load(partial_lse + row, mask=split < num_splits, other=float("-inf"))
    m_i = tl.max(lse, 0)
    sink = 0.0
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        m_i = tl.maximum(m_i, sink)
    floor = tl.where(m_i == float("-inf"), 0.0, m_i)
    weights = tl.exp2(lse - floor)
    partial = tl.load(
        partial_out + row[:, None].to(tl.int64) * DV + offs_dv[None, :],
        mask=(weights > 0)[:, None] & (offs_dv < DV)[None, :], other=0.0,
    )  # fmt: skip
    l_i = tl.sum(weights, 0)
    if SINKS:
        l_i += tl.exp2(sink - floor)
    result = tl.sum(partial * weights[:, None], 0) / tl.where(l_i == 0.0, 1.0, l_i)
    out_ptr = out + token.to(tl.int64) * out_stride_t + head * out_stride_h + offs_dv
    tl.store(out_ptr, result.to(out.dtype.element_ty), mask=offs_dv < DV)


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """Tile sizes of a decode launch."""

    block_n: int
    max_splits: int
    """Most splits of one sequence; a power of two."""
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    """Most registers of a thread, which decides how many programs fit on an SM."""


def paged_attention_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    out: Tensor,
    tiles: DecodeTiles,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scales: Sequence[Tensor] = (),
) -> None:
    """Fill the rows of `out` [T, H, Dv] that belong to sequences with exactly one query.

    q [T, H, Dk]; keys [pages, page_size, Hkv, Dk] and values likewise; cu_seqlens [N+1],
    page_table [N, P] and lengths [N], all int32; scales, of 8-bit pages: [pages, Hkv, page_size].
    """
    (heads, dk), (page_size, kv_heads, dv) = q.shape[1:], values.shape[1:]
    num_seqs, group_size = page_table.shape[0], heads // kv_heads
    single_split = tiles.max_splits == 1
    num_programs = programs_per_kv_head(kv_heads, q.device)
    items = num_seqs if single_split else num_seqs + num_programs
    partials = out if single_split else out.new_empty(items * heads, dv, dtype=torch.float32)
    lse = out if single_split else out.new_empty(items * heads, dtype=torch.float32)
    sinks_or_dummy = out if sinks is None else sinks
    key_scales, value_scales = scales or (keys, values)  # without scales they are not read
    use_pdl = supports_pdl(q.device)
    block_seqs, block_splits = launch_blocks(num_seqs, tiles.max_splits)
    shared = {
        "WINDOW": window is not None,
        "SINKS": sinks is not None,
        "DV": dv,
        "BLOCK_DV": padded_dim(dv),
        "BLOCK_SEQS": block_seqs,
        "MIN_KEYS": MIN_SPLIT_KEYS,
        "USE_PDL": use_pdl,
        "launch_pdl": use_pdl,
    }
    _decode_kernel[(kv_heads, items)](
        q, keys, values, key_scales, value_scales, page_table, lengths, cu_seqlens, sinks_or_dummy,
        out, partials, lse, scale, softcap or 1.0, window or 0, num_seqs, num_programs,
        tiles.max_splits, *q.stride()[:2], *out.stride()[:2], page_table.stride(0),
        *keys.stride()[1:3], *values.stride()[1:3], key_scales.stride(0),
        GROUP_SIZE=group_size, SINGLE_SPLIT=single_split, SOFTCAP=softcap is not None,
        QUANTIZED=len(scales) > 0, PAGE_SIZE=page_size, DK=dk, BLOCK_DK=padded_dim(dk),
        BLOCK_M=max(16, triton.next_power_of_2(group_size)), BLOCK_N=tiles.block_n,
        PRECISION=dot_precision(q), num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        maxnreg=tiles.max_registers, **shared,
    )  # fmt: skip
    if not single_split:
        _combine_kernel[(heads, num_seqs)](
            partials, lse, lengths, cu_seqlens, sinks_or_dummy, out, window or 0, num_seqs,
            num_programs, tiles.max_splits, out.stride(0), out.stride(1),
            BLOCK_SPLITS=block_splits,
            num_warps=1 if block_splits * padded_dim(dv) <= 1024 else 4, **shared,
        )  # fmt: skip


def launch_blocks(num_seqs: int, max_splits: int) -> tuple[int, int]:
    """Return the sequences and the splits that a launch holds in blocks.

    There are few sizes, since the kernels for all of them are compiled before the first step.

    >>> launch_blocks(40, 8), launch_blocks(192, 32), launch_blocks(512, 1)
    ((64, 16), (256, 64), (1, 1))
    """
    if max_splits == 1:
        return 1, 1
    block_seqs = 64 if num_seqs <= 64 else max(256, triton.next_power_of_2(num_seqs))
    return block_seqs, 16 if max_splits <= 16 else max(64, max_splits)


def programs_per_kv_head(kv_heads: int, device: torch.device) -> int:
    """Return how many programs of one kv head run at once, with four programs on every SM."""
    return max(4 * sm_count(device) // kv_heads, 1)
