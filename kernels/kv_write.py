"""Write a step's keys and values into their KV slots: one program per token, no host sync."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .quantized_kv import write_quantized_kv


@triton.jit
def _write_kernel(
    k, v, keys, values, kv_slots, k_stride_t, k_stride_h, v_stride_t, v_stride_h,
    slot_stride_k, slot_stride_v,
    HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    slot = tl.load(kv_slots + token)
    if slot < 0:
        return
    i = tl.arange(0, BLOCK_K)
    row = tl.load(k + token * k_stride_t + i // DK * k_stride_h + i % DK, mask=i < HEADS * DK)
    tl.store(keys + slot * slot_stride_k + i, row.to(keys.dtype.element_ty), mask=i < HEADS * DK)
    j = tl.arange(0, BLOCK_V)
    row = tl.load(v + token * v_stride_t + j // DV * v_stride_h + j % DV, mask=j < HEADS * DV)
    tl.store(
        values + slot * slot_stride_v + j, row.to(values.dtype.element_ty), mask=j < HEADS * DV
    )


def write_kv(
    k: Tensor, v: Tensor, keys: Tensor, values: Tensor, kv_slots: Tensor, *scales: Tensor
) -> None:
    """Write k [T, Hkv, Dk] and v [T, Hkv, Dv] into slots [T] of a layer's pages; -1: skip.

    scales: those of keys and values in 8 bits.
    """
    if scales:
        write_quantized_kv(k, v, keys, values, kv_slots, *scales)
        return
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    heads, dk = k.shape[1:]
    dv = v.shape[2]
    _write_kernel[(k.shape[0],)](
        k, v, keys, values, kv_slots, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        keys.stride(1), values.stride(1), HEADS=heads, DK=dk, DV=dv,
        BLOCK_K=triton.next_power_of_2(heads * dk), BLOCK_V=triton.next_power_of_2(heads * dv),
        num_warps=4,
    )  # fmt: skip
