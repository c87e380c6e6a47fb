"""Attention over pages for sequences with several queries (prefill); paged_decode does the others.

A program takes a kv head and a tile of queries. The rows of the tile are queries x query heads of
the group, so that keys are read once per group. The first tile of sequence n is
cu_seqlens[n] // TILE_QUERIES + n: an upper bound that needs no lengths on the host. Surplus tiles
return at once.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from .attention_tile import attend_keys, dot_precision, normalize, padded_dim


@triton.jit
def _find_sequence(cu_seqlens, tile, num_seqs, TILE_QUERIES: tl.constexpr):
    """Return the last sequence whose first tile is not after this one (binary search)."""
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(cu_seqlens + middle) // TILE_QUERIES + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit(do_not_specialize=["window", "scale", "softcap", "page_table_stride", "num_seqs"])
def _prefill_kernel(
    q, keys, values, key_scales, value_scales, page_table, lengths, cu_seqlens, sinks, out,
    scale, softcap, window, num_seqs,
    q_stride_t, q_stride_h, out_stride_t, out_stride_h, page_table_stride,
    slot_stride_k, head_stride_k, slot_stride_v, head_stride_v, page_stride_s,
    GROUP_SIZE: tl.constexpr, BLOCK_GROUP: tl.constexpr, TILE_QUERIES: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, QUANTIZED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    # Late tiles see the most keys: start them first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    seq = _find_sequence(cu_seqlens, tile, num_seqs, TILE_QUERIES)
    start = tl.load(cu_seqlens + seq)
    num_queries = tl.load(cu_seqlens + seq + 1) - start
    first_query = (tile - start // TILE_QUERIES - seq) * TILE_QUERIES
    if (first_query >= num_queries) | (num_queries == 1):
        return
    length = tl.load(lengths + seq)

    BLOCK_M: tl.constexpr = TILE_QUERIES * BLOCK_GROUP
    offs_m = tl.arange(0, BLOCK_M)
    query = first_query + offs_m // BLOCK_GROUP
    head = kv_head * GROUP_SIZE + offs_m % BLOCK_GROUP
    mask_m = (query < num_queries) & (offs_m % BLOCK_GROUP < GROUP_SIZE)
    offs_dk = tl.arange(0, BLOCK_DK)
    offs_dv = tl.arange(0, BLOCK_DV)
    token = (start + query).to(tl.int64)
    q_tile = tl.load(
        q + token[:, None] * q_stride_t + head[:, None] * q_stride_h + offs_dk[None, :],
        mask=mask_m[:, None] & (offs_dk < DK)[None, :], other=0.0,
    )  # fmt: skip
    last_key = length - num_queries + query
    first_last_key = length - num_queries + first_query
    key_end = tl.minimum(first_last_key + TILE_QUERIES, length)
    table = page_table + seq.to(tl.int64) * page_table_stride
    keys += kv_head * head_stride_k
    values += kv_head * head_stride_v
    key_scales += kv_head * PAGE_SIZE
    value_scales += kv_head * PAGE_SIZE
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    if WINDOW:
        masked_start = tl.maximum(first_last_key - window + 1, 0) // BLOCK_N * BLOCK_N
    else:
        masked_start = (first_last_key + 1) // BLOCK_N * BLOCK_N
        acc, m_i, l_i = attend_keys(
            q_tile, acc, m_i, l_i, last_key, 0, masked_start, table, keys, values, key_scales,
            value_scales, slot_stride_k, slot_stride_v, page_stride_s, scale, softcap, window,
            False, WINDOW, SOFTCAP, QUANTIZED, PAGE_SIZE, DK, DV, BLOCK_DK, BLOCK_DV, BLOCK_N,
            PRECISION,
        )  # fmt: skip
    acc, m_i, l_i = attend_keys(
        q_tile, acc, m_i, l_i, last_key, masked_start, key_end, table, keys, values, key_scales,
        value_scales, slot_stride_k, slot_stride_v, page_stride_s, scale, softcap, window, True,
        WINDOW, SOFTCAP, QUANTIZED, PAGE_SIZE, DK, DV, BLOCK_DK, BLOCK_DV, BLOCK_N, PRECISION,
    )  # fmt: skip

    sink = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        sink = tl.load(sinks + head, mask=mask_m, other=0.0).to(tl.float32)
    result = normalize(acc, m_i, l_i, sink, SINKS)
    out_ptr = out + token[:, None] * out_stride_t + head[:, None] * out_stride_h + offs_dv[None, :]
    mask_out = mask_m[:, None] & (offs_dv < DV)[None, :]
    tl.store(out_ptr, result.to(out.dtype.element_ty), mask=mask_out)


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """Tile sizes of a prefill launch."""

    block_m: int
    """Rows of a tile: queries x query heads of the group."""
    block_n: int
    num_warps: int
    num_stages: int


def paged_attention_prefill(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    out: Tensor,
    tiles: PrefillTiles,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scales: Sequence[Tensor] = (),
) -> None:
    """Fill the rows of `out` that belong to sequences with several queries.

    Shapes as in `paged_attention_decode`.
    """
    tokens, heads, dk = q.shape
    page_size, kv_heads, dv = values.shape[1:]
    group_size = heads // kv_heads
    block_group = triton.next_power_of_2(group_size)
    tile_queries = max(1, tiles.block_m // block_group)
    num_seqs = page_table.shape[0]
    key_scales, value_scales = scales or (keys, values)  # without scales they are not read
    _prefill_kernel[(kv_heads, tokens // tile_queries + num_seqs)](
        q, keys, values, key_scales, value_scales, page_table, lengths, cu_seqlens,
        out if sinks is None else sinks, out,
        scale, softcap or 1.0, window or 0, num_seqs,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), page_table.stride(0),
        keys.stride(1), keys.stride(2), values.stride(1), values.stride(2),
        key_scales.stride(0), QUANTIZED=len(scales) > 0,
        GROUP_SIZE=group_size, BLOCK_GROUP=block_group, TILE_QUERIES=tile_queries,
        WINDOW=window is not None, SOFTCAP=softcap is not None, SINKS=sinks is not None,
        PAGE_SIZE=page_size, DK=dk, DV=dv, BLOCK_DK=padded_dim(dk), BLOCK_DV=padded_dim(dv),
        BLOCK_N=tiles.block_n, PRECISION=dot_precision(q), num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )  # fmt: skip
