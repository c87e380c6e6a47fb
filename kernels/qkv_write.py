"""Sum QKV partials, apply QK norm and rotary, write keys and values to KV slots, return queries.

    partials [S, M, (H + 2 Hkv) D] ─▶ sum, bias ─▶ QK norm, rotary ─┬─▶ queries [M, H, D]
                                                                    └─▶ keys and values, into slots

`write_qkv` does it for all tokens of a step; `fused_decode` computes the same in the attention
kernel itself. The rows of a tile are the queries of a group and their new key.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_tile import padded_dim
from .quantized_kv import store_quantized

MANY_TOKENS = 1024
"""From this many tokens on, a program takes several kv heads: fewer programs fill the device."""


@dataclass(frozen=True, slots=True, eq=False)
class QKTransform:
    """The steps from projections to queries and keys: optional bias and QK norms, and rotary."""

    cos: Tensor
    """[positions, D]."""
    sin: Tensor
    bias: Tensor | None = None
    q_gain: Tensor | None = None
    k_gain: Tensor | None = None
    eps: float = 0.0


@triton.jit
def sum_split_k(
    partials, bias, num_rows, row, column, mask,
    width: tl.constexpr, NUM_PARTIALS: tl.constexpr, dtype: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Return the sum of the partials at `column`, rounded to dtype like a product's result."""
    value = tl.zeros(column.shape, tl.float32)
    for split in tl.static_range(NUM_PARTIALS):
        ptr = partials + (split * num_rows + row) * width + column
        value += tl.load(ptr, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    return value.to(dtype).to(tl.float32)


@triton.jit
def load_group(
    partials, bias, cos, sin, q_gain, k_gain, kv_slots, lengths, eps, num_rows, cos_stride, row,
    kv_head, offs_m, offs_d,
    WIDTH: tl.constexpr, NUM_PARTIALS: tl.constexpr, HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    USE_PDL: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Return queries and key of a group after norm and rotary, the token's position and KV slot."""
    # Everything the step started with can be read here; the partials may still be computed.
    position = tl.load(lengths + row) - 1
    slot = tl.load(kv_slots + row)
    mask_d = offs_d < D
    cos_d = tl.load(cos + position * cos_stride + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    sin_d = tl.load(sin + position * cos_stride + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    qk = _norm_and_rotate(
        partials, bias, cos_d, sin_d, q_gain, k_gain, eps, num_rows, row, kv_head, offs_m, offs_d,
        WIDTH, NUM_PARTIALS, HEADS, GROUP_SIZE, D, NORM, BIAS, dtype,
    )  # fmt: skip
    return qk, position, slot


@triton.jit
def _norm_and_rotate(
    partials, bias, cos_d, sin_d, q_gain, k_gain, eps, num_rows, row, kv_head, offs_m, offs_d,
    WIDTH: tl.constexpr, NUM_PARTIALS: tl.constexpr, HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Return the rows of a group after norm and rotary: its queries, then its key (GROUP_SIZE)."""
    mask_d = (offs_d < D)[None, :]
    is_query = (offs_m < GROUP_SIZE)[:, None]
    mask = (offs_m <= GROUP_SIZE)[:, None] & mask_d
    first = tl.where(is_query, kv_head * GROUP_SIZE + offs_m[:, None], HEADS + kv_head) * D
    partner = tl.where(offs_d < D // 2, offs_d + D // 2, offs_d - D // 2)[None, :]
    x = sum_split_k(
        partials, bias, num_rows, row, first + offs_d[None, :], mask,
        WIDTH, NUM_PARTIALS, dtype, BIAS,
    )  # fmt: skip
    x_partner = sum_split_k(
        partials, bias, num_rows, row, first + partner, mask, WIDTH, NUM_PARTIALS, dtype, BIAS
    )
    if NORM:
        rstd = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        q_x = tl.load(q_gain + offs_d[None, :], mask=mask_d, other=0.0).to(tl.float32)
        k_x = tl.load(k_gain + offs_d[None, :], mask=mask_d, other=0.0).to(tl.float32)
        q_partner = tl.load(q_gain + partner, mask=mask_d, other=0.0).to(tl.float32)
        k_partner = tl.load(k_gain + partner, mask=mask_d, other=0.0).to(tl.float32)
        x = (x * rstd).to(dtype).to(tl.float32) * tl.where(is_query, q_x, k_x)
        x_partner = (x_partner * rstd).to(dtype).to(tl.float32)
        x_partner = x_partner * tl.where(is_query, q_partner, k_partner)
        x, x_partner = x.to(dtype).to(tl.float32), x_partner.to(dtype).to(tl.float32)
    sign = tl.where(offs_d < D // 2, -1.0, 1.0)[None, :]
    return (x * cos_d[None, :] + x_partner * sin_d[None, :] * sign).to(dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _write_kernel(
    partials, bias, cos, sin, q_gain, k_gain, keys, values, kv_slots, lengths, out, eps, num_rows,
    cos_stride, slot_stride_k, slot_stride_v, key_scales, value_scales,
    NUM_PARTIALS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    USE_PDL: tl.constexpr, BLOCK_HEADS: tl.constexpr, QUANTIZED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Take BLOCK_HEADS kv heads of one token; each has BLOCK_M rows of the tile."""
    GROUP_SIZE: tl.constexpr = HEADS // KV_HEADS
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    first_head = tl.program_id(0) * BLOCK_HEADS
    row = tl.program_id(1).to(tl.int64)
    dtype: tl.constexpr = out.dtype.element_ty
    offs = tl.arange(0, BLOCK_HEADS * BLOCK_M)
    kv_head, offs_m = (first_head + offs // BLOCK_M)[:, None], offs % BLOCK_M
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    qk, _, slot = load_group(
        partials, bias, cos, sin, q_gain, k_gain, kv_slots, lengths, eps, num_rows, cos_stride, row,
        kv_head, offs_m, offs_d,
        WIDTH, NUM_PARTIALS, HEADS, GROUP_SIZE, D, NORM, BIAS, USE_PDL, dtype,
    )  # fmt: skip
    query = row * HEADS + kv_head * GROUP_SIZE + offs_m[:, None]
    mask_q = (offs_m < GROUP_SIZE)[:, None] & mask_d[None, :]
    tl.store(out + query * D + offs_d[None, :], qk, mask=mask_q)
    if slot >= 0:
        is_key = offs_m == GROUP_SIZE
        if QUANTIZED:
            head = first_head + offs // BLOCK_M
            store_quantized(
                qk, keys, key_scales, slot, slot_stride_k, head, is_key, offs_d,
                KV_HEADS, D, PAGE_SIZE,
            )  # fmt: skip
        else:
            k_ptr = keys + slot * slot_stride_k + kv_head * D + offs_d[None, :]
            tl.store(k_ptr, qk, mask=is_key[:, None] & mask_d[None, :])
        v_head = (first_head + tl.arange(0, BLOCK_HEADS))[:, None]
        v_column = (HEADS + KV_HEADS + v_head) * D + offs_d[None, :]
        mask_v = mask_d[None, :]
        value = sum_split_k(
            partials, bias, num_rows, row, v_column, mask_v, WIDTH, NUM_PARTIALS, dtype, BIAS
        )
        if QUANTIZED:
            head = first_head + tl.arange(0, BLOCK_HEADS)
            store_quantized(
                value, values, value_scales, slot, slot_stride_v, head, head < KV_HEADS, offs_d,
                KV_HEADS, D, PAGE_SIZE,
            )  # fmt: skip
        else:
            v_ptr = values + slot * slot_stride_v + v_head * D + offs_d[None, :]
            tl.store(v_ptr, value.to(dtype), mask=mask_v)


def write_qkv(
    partials: Tensor,
    transform: QKTransform,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    kv_slots: Tensor,
    heads: int,
    use_pdl: bool,
    scales: Sequence[Tensor] = (),
) -> Tensor:
    """Write the keys and values of `partials` into their KV slots; return the queries [M, H, D].

    scales: those of keys and values in 8 bits, [pages, Hkv, page_size].
    """
    num_rows = partials.shape[1]
    kv_heads, dim = keys.shape[2:]
    out = torch.empty(num_rows, heads, dim, dtype=transform.cos.dtype, device=partials.device)
    args, constants = qkv_arguments(
        partials, transform, keys, values, lengths, kv_slots, out, use_pdl, min_rows=1
    )
    block_heads = 1
    while num_rows >= MANY_TOKENS and block_heads < 8 and kv_heads % (2 * block_heads) == 0:
        block_heads *= 2
    _write_kernel[(kv_heads // block_heads, num_rows)](
        *args, *(scales or (keys, values)), **constants, BLOCK_HEADS=block_heads,
        QUANTIZED=len(scales) > 0, PAGE_SIZE=keys.shape[1], launch_pdl=use_pdl,
        num_warps=4 if block_heads > 1 else 1,
    )  # fmt: skip
    return out


def qkv_arguments(
    partials: Tensor,
    transform: QKTransform,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    kv_slots: Tensor,
    out: Tensor,
    use_pdl: bool,
    min_rows: int = 16,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of both kernels; min_rows: rows of a tile, 16 for a dot."""
    kv_heads, dim = keys.shape[2:]
    heads, cos = out.shape[1], transform.cos
    optional = transform.bias, transform.q_gain, transform.k_gain
    bias, q_gain, k_gain = (cos if x is None else x for x in optional)
    args = (
        partials, bias, cos, transform.sin, q_gain, k_gain, keys, values, kv_slots, lengths, out,
        transform.eps, partials.shape[1], cos.stride(0), keys.stride(1), values.stride(1),
    )  # fmt: skip
    constants = {
        "NUM_PARTIALS": len(partials), "HEADS": heads, "KV_HEADS": kv_heads,
        "D": dim, "BLOCK_D": padded_dim(dim),
        "BLOCK_M": max(min_rows, triton.next_power_of_2(heads // kv_heads + 1)),
        "NORM": transform.q_gain is not None, "BIAS": transform.bias is not None,
        "USE_PDL": use_pdl,
    }  # fmt: skip
    return args, constants
