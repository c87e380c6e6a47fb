"""Fused decode attention: sum QKV partials, QK norm, rotary, KV write and attention in one kernel.

    partials [S, M, (H + 2 Hkv) D] ─▶ QK norm, rotary ─┬─▶ new key and value, into their KV slot
                                                       └─▶ queries ─▶ paged keys ─▶ out [M, H, D]

The kernel is for few sequences; with many, `write_qkv` computes the first half. A program handles
(kv head, split, sequence): the queries of the group and their new key are the rows of one tile. The
first split takes the new token from the partials; the keys before it are divided over all splits,
and the program that ends last combines them.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_tile import attend_keys, dot_precision, padded_dim
from .launch import sm_count
from .paged_decode import DecodeTiles
from .qkv_write import QKTransform, load_group, qkv_arguments, sum_split_k

MAX_FUSED_SEQS = 128
"""Largest number of sequences for which one kernel is faster than three, measured on an H200."""
_MAX_KEYS = 2048
"""Most keys of a program."""


@triton.jit(do_not_specialize=["num_rows", "page_table_stride"])
def _attention_kernel(
    partials, bias, cos, sin, q_gain, k_gain, keys, values, kv_slots, lengths, out, eps, num_rows,
    cos_stride, slot_stride_k, slot_stride_v,
    page_table, split_out, split_lse, split_counters, scale, page_table_stride,
    NUM_PARTIALS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    USE_PDL: tl.constexpr,
    NUM_SPLITS: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    GROUP_SIZE: tl.constexpr = HEADS // KV_HEADS
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    dtype: tl.constexpr = out.dtype.element_ty
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    qk, num_cached, slot = load_group(
        partials, bias, cos, sin, q_gain, k_gain, kv_slots, lengths, eps, num_rows, cos_stride, row,
        kv_head, offs_m, offs_d,
        WIDTH, NUM_PARTIALS, HEADS, GROUP_SIZE, D, NORM, BIAS, USE_PDL, dtype,
    )  # fmt: skip
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if split == 0:
        qk_fp32 = qk.to(tl.float32)
        key = tl.sum(tl.where((offs_m == GROUP_SIZE)[:, None], qk_fp32, 0.0), 0)
        v_column = (HEADS + KV_HEADS + kv_head) * D + offs_d
        value = sum_split_k(
            partials, bias, num_rows, row, v_column, mask_d, WIDTH, NUM_PARTIALS, dtype, BIAS
        )
        m_i = tl.sum(qk_fp32 * key[None, :], 1) * (scale * 1.4426950408889634)
        l_i = tl.full([BLOCK_M], 1.0, tl.float32)
        acc += value[None, :]
        if slot >= 0:
            k_ptr = keys + slot * slot_stride_k + kv_head * D + offs_d
            v_ptr = values + slot * slot_stride_v + kv_head * D + offs_d
            tl.store(k_ptr, key.to(dtype), mask=mask_d)
            tl.store(v_ptr, value.to(dtype), mask=mask_d)

    split_keys = tl.cdiv(tl.cdiv(num_cached, BLOCK_N), NUM_SPLITS) * BLOCK_N
    start = split * split_keys
    acc, m_i, l_i = attend_keys(
        qk, acc, m_i, l_i, tl.full([1], 0, tl.int32) + num_cached - 1,
        start, tl.minimum(start + split_keys, num_cached), page_table + row * page_table_stride,
        keys + kv_head * D, values + kv_head * D, keys, values, slot_stride_k, slot_stride_v, 0,
        scale, 1.0, 0, True, False, False, False, PAGE_SIZE, D, D, BLOCK_D, BLOCK_D, BLOCK_N,
        PRECISION,
    )  # fmt: skip
    result = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    mask_out = (offs_m < GROUP_SIZE)[:, None] & mask_d[None, :]
    query = row * HEADS + kv_head * GROUP_SIZE + offs_m
    out_ptr = out + query[:, None] * D + offs_d[None, :]
    if NUM_SPLITS == 1:
        tl.store(out_ptr, result.to(dtype), mask=mask_out)
    else:
        split_row = query * NUM_SPLITS + split
        tl.store(split_out + split_row[:, None] * D + offs_d[None, :], result, mask=mask_out)
        lse = tl.where(l_i == 0.0, float("-inf"), m_i + tl.log2(l_i))
        tl.store(split_lse + split_row, lse, mask=offs_m < GROUP_SIZE)
        tl.debug_barrier()
        counter = split_counters + row * KV_HEADS + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel") == NUM_SPLITS - 1:
            _combine_splits(
                split_out, split_lse, query, offs_m, offs_d, out_ptr, mask_out,
                NUM_SPLITS, GROUP_SIZE, D, BLOCK_D, BLOCK_M,
            )  # fmt: skip
            tl.store(counter, 0)


@triton.jit
def _combine_splits(
    split_out, split_lse, query, offs_m, offs_d, out_ptr, mask_out,
    NUM_SPLITS: tl.constexpr, GROUP_SIZE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Combine the splits by their log-sum-exp, read past the L1 cache, which may be stale."""
    splits = tl.arange(0, NUM_SPLITS)
    mask_m = (offs_m < GROUP_SIZE)[:, None]
    lse_ptr = split_lse + query[:, None] * NUM_SPLITS + splits[None, :]
    lse = tl.load(lse_ptr, mask=mask_m, other=float("-inf"), cache_modifier=".cg")
    m_i = tl.max(lse, 1)
    m_i = tl.where(m_i == float("-inf"), 0.0, m_i)
    l_i = tl.sum(tl.exp2(lse - m_i[:, None]), 1)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        row = query * NUM_SPLITS + split
        weight = tl.load(
            split_lse + row, mask=offs_m < GROUP_SIZE, other=float("-inf"), cache_modifier=".cg"
        )
        ptr = split_out + row[:, None] * D + offs_d[None, :]
        result = tl.load(ptr, mask=mask_out, other=0.0, cache_modifier=".cg")
        acc += result * tl.exp2(weight - m_i)[:, None]
    result = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    tl.store(out_ptr, result.to(out_ptr.dtype.element_ty), mask=mask_out)


def fused_decode_attention(
    partials: Tensor,
    transform: QKTransform,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    kv_slots: Tensor,
    heads: int,
    scale: float,
    tiles: DecodeTiles,
    split_counters: Tensor,
    use_pdl: bool,
) -> Tensor:
    """Attend the tokens of `partials` and write their keys and values into their KV slots.

    Args:
        keys, values: pages of a layer, [pages, page_size, Hkv, D].
        page_table: int32 [M, P]; lengths: int32 [M], this token included; kv_slots: int64 [M].
        split_counters: int32 zeros [M, Hkv]; zeros again afterwards.
    """
    num_rows, num_splits = partials.shape[1], tiles.max_splits
    page_size, kv_heads, dim = keys.shape[1:]
    out = torch.empty(num_rows, heads, dim, dtype=transform.cos.dtype, device=partials.device)
    shape = (num_rows * heads * num_splits, dim) if num_splits > 1 else (0, 0)
    split_out = torch.empty(shape, dtype=torch.float32, device=partials.device)
    split_lse = torch.empty(shape[0], dtype=torch.float32, device=partials.device)
    args, constants = qkv_arguments(
        partials, transform, keys, values, lengths, kv_slots, out, use_pdl
    )
    _attention_kernel[(kv_heads, num_splits, num_rows)](
        *args, page_table, split_out, split_lse, split_counters, scale, page_table.stride(0),
        **constants, NUM_SPLITS=num_splits, PAGE_SIZE=page_size, BLOCK_N=tiles.block_n,
        PRECISION=dot_precision(out), launch_pdl=use_pdl, num_warps=tiles.num_warps,
        num_stages=tiles.num_stages, maxnreg=tiles.max_registers,
    )  # fmt: skip
    return out


def fused_decode_tiles(
    keys: Tensor, heads: int, num_rows: int, max_length: int
) -> DecodeTiles | None:
    """Return the tiles, or None where `write_qkv` and paged attention are faster.

    Measured on an H200 in whole steps.

    Splits: four programs per SM for up to 16 sequences; eight for more, because shorter programs
    even out different lengths. Unlike in paged attention, their number does not depend on the
    lengths, so a program could get very many keys.

    Blocks: 16 KiB of keys, two in flight; for heads of up to 128, half as large, with four in
    flight, in programs of two warps that have a whole sequence. With heads of 128, a third block
    makes steps of up to 16 sequences 4 to 9 % faster.

    Registers: few enough for four programs of four warps on an SM, if they have at most two blocks,
    which gains up to 4 % of a step. Products in fp32, wider heads and groups of 16 heads or more
    would spill.
    """
    row_bytes = padded_dim(keys.shape[3]) * keys.element_size()
    programs_per_sm = 4 if num_rows <= 16 else 8
    num_programs = programs_per_sm * sm_count(keys.device) // (num_rows * keys.shape[2])
    block_n = max(16, (16 << 10) // max(row_bytes, 128))
    limit = min(num_programs, 16, max_length // block_n)
    num_splits = 1 << (max(limit, 1).bit_length() - 1)
    if num_rows > MAX_FUSED_SEQS or max_length > _MAX_KEYS * num_splits:
        return None
    if num_programs < 2 and row_bytes <= 256:
        return DecodeTiles(block_n // 2, 1, num_warps=2, num_stages=4)
    num_stages = 3 if row_bytes == 256 and num_rows <= 16 else 2
    is_small = row_bytes <= 256 and heads // keys.shape[2] < 16
    max_registers = 128 if is_small and keys.element_size() == 2 else None
    return DecodeTiles(block_n, num_splits, 4, num_stages, max_registers)
