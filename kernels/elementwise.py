"""Small Triton kernels for what a decode step is otherwise full of: norm, rotary, gate.

Each reads its input once and writes its output once, in the arithmetic of the modules they stand in
for: float32 inside, rounded where those round.
"""

# Triton launches with what its kernels declare, plus settings of its own.
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["inner", "outer_stride"])
def _rms_norm(x, weight, out, eps, width, inner, outer_stride, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WIDTH)
    inside = place < width
    at = x + row // inner * outer_stride + row % inner * width
    value = tl.load(at + place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / width + eps)
    rounded = (value * scale).to(x.dtype.element_ty).to(tl.float32)
    gain = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + place, rounded * gain, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, then the gain."""
    width = x.shape[-1]
    # Heads of one token lie together, but tokens may be apart: part of a wider product's rows.
    heads = x.ndim == 4 and len(x) == 1 and x.stride()[2:] == (width, 1)
    if not heads:
        x = x.contiguous()
    inner, outer = (x.shape[2], x.stride(1)) if heads else (max(x.numel() // width, 1), 0)
    dtype = torch.promote_types(x.dtype, weight.dtype)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    block, warps = _shape(width)
    if x.numel():
        rows = x.numel() // width
        _rms_norm[(rows,)](x, weight, out, eps, width, inner, outer, block, num_warps=warps)
    return out


@triton.jit
def _add_rms_norm(x, delta, weight, total, out, eps, width, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WIDTH)
    inside = place < width
    value = tl.load(x + row * width + place, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(delta + row * width + place, mask=inside, other=0.0).to(tl.float32)
    value = value.to(total.dtype.element_ty)
    tl.store(total + row * width + place, value, mask=inside)
    value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / width + eps)
    rounded = (value * scale).to(total.dtype.element_ty).to(tl.float32)
    gain = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + place, rounded * gain, mask=inside)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of a residual and what a layer adds to it, and the norm of that."""
    x, delta = x.contiguous(), delta.contiguous()
    total = torch.empty_like(x, dtype=torch.promote_types(x.dtype, delta.dtype))
    out = torch.empty_like(x, dtype=torch.promote_types(total.dtype, weight.dtype))
    width = x.shape[-1]
    block, warps = _shape(width)
    if x.numel():
        rows = x.numel() // width
        _add_rms_norm[(rows,)](x, delta, weight, total, out, eps, width, block, num_warps=warps)
    return total, out


def _shape(width: int) -> tuple[int, int]:
    block = triton.next_power_of_2(width)
    return block, 1 if block <= 256 else 4 if block <= 2048 else 8


@triton.jit
def _silu_mul(gate, up, out, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    value = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    value = (value / (1.0 + tl.exp(-value))).to(gate.dtype.element_ty).to(tl.float32)
    factor = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, value * factor, mask=inside)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU of the gate, times the other branch."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    if gate.numel():
        _silu_mul[(triton.cdiv(gate.numel(), 1024),)](gate, up, out, gate.numel(), 1024)
    return out


@triton.jit
def _rotate(
    x, out, cos, sin, x_token, x_head, cos_token, heads,
    HEADS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    place = tl.arange(0, WIDTH)[None, :]
    inside = (head < heads) & (place < HALF)
    at = x + token * x_token + head * x_head + place
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    turn = token * cos_token + place
    side = place < HALF
    cos1 = tl.load(cos + turn, mask=side, other=0.0).to(tl.float32)
    sin1 = tl.load(sin + turn, mask=side, other=0.0).to(tl.float32)
    cos2 = tl.load(cos + turn + HALF, mask=side, other=0.0).to(tl.float32)
    sin2 = tl.load(sin + turn + HALF, mask=side, other=0.0).to(tl.float32)
    to = out + (token * heads + head) * (2 * HALF) + place
    tl.store(to, first * cos1 - second * sin1, mask=inside)
    tl.store(to + HALF, second * cos2 + first * sin2, mask=inside)


@triton.jit
def _rotate_both(
    q, k, q_out, k_out, cos, sin, q_token, q_head, k_token, k_head, cos_token, q_heads, k_heads,
    Q: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    _rotate(q, q_out, cos, sin, q_token, q_head, cos_token, q_heads, Q, HALF, WIDTH)
    _rotate(k, k_out, cos, sin, k_token, k_head, cos_token, k_heads, K, HALF, WIDTH)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turn queries [1, H, T, D] and keys [1, Hkv, T, D] by their positions' angles [1, T, D]."""
    _, heads, tokens, width = q.shape
    outs = [
        torch.empty(1, tokens, x.shape[1], width, dtype=x.dtype, device=x.device) for x in (q, k)
    ]
    half = width // 2
    if tokens:
        _rotate_both[(tokens,)](
            q, k, *outs, cos, sin, q.stride(2), q.stride(1), k.stride(2), k.stride(1),
            cos.stride(1), heads, k.shape[1], triton.next_power_of_2(heads),
            triton.next_power_of_2(k.shape[1]), half, triton.next_power_of_2(half), num_warps=4,
        )  # fmt: skip
    return outs[0].transpose(1, 2), outs[1].transpose(1, 2)
