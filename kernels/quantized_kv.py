"""8-bit keys and values in Triton: quantize, write to KV slots; convert queries for their products.

The numbers are those of `attention/paging/quantized.py`, bit for bit.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def quantize(x, INT8: tl.constexpr):
    """Return x [M, D] before its last conversion to 8 bits, and its scales [M] in bfloat16."""
    LARGEST: tl.constexpr = 127.0 if INT8 else 448.0
    SMALLEST_SCALE: tl.constexpr = 2.0**-120
    ROUND: tl.constexpr = 1.5 * 2.0**23  # adding it leaves no bit below 1
    # As integers, so that a NaN is the largest of all.
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32))
    scale = tl.where(scale < SMALLEST_SCALE, SMALLEST_SCALE, scale).to(tl.bfloat16)
    rows = tl.div_rn(x, tl.broadcast_to(scale.to(tl.float32)[:, None], x.shape))
    if INT8:
        rows = (rows + ROUND) - ROUND
    return rows, scale


@triton.jit
def dot_operand(q, page_dtype: tl.constexpr):
    """Return q [M, D] in the dtype of its products with 8-bit numbers, and its scales [M, 1].

    fp8 is exact in float16, and converted two at a time; q has to fit into float16.
    """
    if page_dtype == tl.int8 or q.dtype == tl.float32:
        return q, tl.full([1, 1], 1.0, tl.float32)
    else:
        rows = q.to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(rows), 1), 2.0**-120)[:, None]
        return (rows / scale).to(tl.float16), scale


@triton.jit
def store_quantized(
    x, pages, scales, slot, slot_stride, head, mask_head, offs_d,
    HEADS: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Store rows x [M, BLOCK_D] of heads [M], those of `mask_head` alone, into a KV slot."""
    dtype: tl.constexpr = pages.dtype.element_ty
    rows, scale = quantize(x.to(tl.float32), dtype == tl.int8)
    ptr = pages + slot * slot_stride + head[:, None] * D + offs_d[None, :]
    tl.store(ptr, rows.to(dtype), mask=mask_head[:, None] & (offs_d < D)[None, :])
    scale_ptr = scales + (slot // PAGE_SIZE * HEADS + head) * PAGE_SIZE + slot % PAGE_SIZE
    tl.store(scale_ptr, scale, mask=mask_head)


@triton.jit
def _write_kernel(
    k, v, keys, values, key_scales, value_scales, kv_slots,
    k_stride_t, k_stride_h, v_stride_t, v_stride_h, slot_stride_k, slot_stride_v,
    HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(kv_slots + token)
    if slot < 0:
        return
    head = tl.arange(0, BLOCK_H)
    mask_head = head < HEADS
    offs = tl.arange(0, BLOCK_DK)
    ptr = k + token * k_stride_t + head[:, None] * k_stride_h + offs[None, :]
    rows = tl.load(ptr, mask=mask_head[:, None] & (offs < DK)[None, :], other=0.0)
    store_quantized(
        rows, keys, key_scales, slot, slot_stride_k, head, mask_head, offs, HEADS, DK, PAGE_SIZE
    )
    offs = tl.arange(0, BLOCK_DV)
    ptr = v + token * v_stride_t + head[:, None] * v_stride_h + offs[None, :]
    rows = tl.load(ptr, mask=mask_head[:, None] & (offs < DV)[None, :], other=0.0)
    store_quantized(
        rows, values, value_scales, slot, slot_stride_v, head, mask_head, offs, HEADS, DV, PAGE_SIZE
    )


def write_quantized_kv(
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    kv_slots: Tensor,
    key_scales: Tensor,
    value_scales: Tensor,
) -> None:
    """Write k [T, Hkv, Dk] and v [T, Hkv, Dv] into slots [T] of a layer's pages; -1: skip."""
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    (tokens, heads, dk), dv = k.shape, v.shape[2]
    _write_kernel[(tokens,)](
        k, v, keys, values, key_scales, value_scales, kv_slots,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), keys.stride(1), values.stride(1),
        HEADS=heads, DK=dk, DV=dv, PAGE_SIZE=keys.shape[1],
        BLOCK_H=triton.next_power_of_2(heads), BLOCK_DK=triton.next_power_of_2(dk),
        BLOCK_DV=triton.next_power_of_2(dv), num_warps=4,
    )  # fmt: skip
