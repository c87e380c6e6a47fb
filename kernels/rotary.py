"""Rotary position embedding of queries and keys (the rotate-half form), forward only.

One program takes a token and loads its angles once for all heads of q and k.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotary_kernel(
    q, k, q_out, k_out, cos, sin, q_stride_t, q_stride_h, k_stride_t, k_stride_h,
    q_out_stride_t, k_out_stride_t, cos_stride_t, q_heads, k_heads,
    BLOCK_Q_HEADS: tl.constexpr, BLOCK_K_HEADS: tl.constexpr,
    HALF: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    mask = offs_d < HALF
    offs_cos = token * cos_stride_t + offs_d
    cos1 = tl.load(cos + offs_cos, mask=mask, other=0.0).to(tl.float32)
    cos2 = tl.load(cos + offs_cos + HALF, mask=mask, other=0.0).to(tl.float32)
    sin1 = tl.load(sin + offs_cos, mask=mask, other=0.0).to(tl.float32)
    sin2 = tl.load(sin + offs_cos + HALF, mask=mask, other=0.0).to(tl.float32)
    _rotate_heads(
        q + token * q_stride_t, q_out + token * q_out_stride_t, q_stride_h, q_heads,
        cos1, cos2, sin1, sin2, BLOCK_Q_HEADS, HALF, BLOCK_D,
    )  # fmt: skip
    _rotate_heads(
        k + token * k_stride_t, k_out + token * k_out_stride_t, k_stride_h, k_heads,
        cos1, cos2, sin1, sin2, BLOCK_K_HEADS, HALF, BLOCK_D,
    )  # fmt: skip


@triton.jit
def _rotate_heads(
    x, out, stride_h, num_heads, cos1, cos2, sin1, sin2,
    BLOCK_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head, offs_d = tl.arange(0, BLOCK_HEADS)[:, None], tl.arange(0, BLOCK_D)[None, :]
    mask = (head < num_heads) & (offs_d < HALF)
    x_ptr, out_ptr = x + head.to(tl.int64) * stride_h + offs_d, out + head * (2 * HALF) + offs_d
    x1 = tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr, x1 * cos1 - x2 * sin1, mask=mask)
    tl.store(out_ptr + HALF, x2 * cos2 + x1 * sin2, mask=mask)


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q [1, H, T, D] and k [1, Hkv, T, D] by cos and sin [1, T, D]; same shapes out."""
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    (_, heads, tokens, dim), kv_heads = q.shape, k.shape[1]
    q_out = q.new_empty(1, tokens, heads, dim)
    k_out = k.new_empty(1, tokens, kv_heads, dim)
    if tokens:
        _rotary_kernel[(tokens,)](
            q, k, q_out, k_out, cos, sin, q.stride(2), q.stride(1), k.stride(2), k.stride(1),
            q_out.stride(1), k_out.stride(1), cos.stride(1), heads, kv_heads,
            triton.next_power_of_2(heads), triton.next_power_of_2(kv_heads),
            dim // 2, triton.next_power_of_2(dim // 2), num_warps=4,
        )  # fmt: skip
    return q_out.transpose(1, 2), k_out.transpose(1, 2)
