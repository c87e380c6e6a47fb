"""Rotary embeddings of queries and keys with their backward: one kernel that turns either way."""

# Triton launches with what its kernels declare, plus settings of its own.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..trainer.fused.autograd import alone


@triton.jit
def _turn(
    q, k, q_out, k_out, cos, sin, q_token, q_head, k_token, k_head, q_out_token, k_out_token,
    angle_token, q_heads, k_heads,
    BACK: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WIDTH)[None, :]
    side = place < HALF
    turn = token * angle_token + place
    cos1 = tl.load(cos + turn, mask=side, other=0.0).to(tl.float32)
    cos2 = tl.load(cos + turn + HALF, mask=side, other=0.0).to(tl.float32)
    sin1 = tl.load(sin + turn, mask=side, other=0.0).to(tl.float32)
    sin2 = tl.load(sin + turn + HALF, mask=side, other=0.0).to(tl.float32)
    if BACK:
        sin1, sin2 = -sin2, -sin1
    q_at, q_to = q + token * q_token, q_out + token * q_out_token
    k_at, k_to = k + token * k_token, k_out + token * k_out_token
    _turn_heads(q_at, q_to, q_head, q_heads, cos1, cos2, sin1, sin2, Q_HEADS, HALF, WIDTH)
    _turn_heads(k_at, k_to, k_head, k_heads, cos1, cos2, sin1, sin2, K_HEADS, HALF, WIDTH)


@triton.jit
def _turn_heads(
    x, out, x_head, heads, cos1, cos2, sin1, sin2,
    HEADS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    head, place = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
    inside = (head < heads) & (place < HALF)
    at, to = x + head.to(tl.int64) * x_head + place, out + head * (2 * HALF) + place
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(to, first * cos1 - second * sin1, mask=inside)
    tl.store(to + HALF, second * cos2 + first * sin2, mask=inside)


def _turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    """From [1, H, T, D] to [1, T, H, D]."""
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    _, heads, tokens, width = q.shape
    q_out, k_out = _room(q, k, together=back)
    if tokens:
        _turn[(tokens,)](
            q, k, q_out, k_out, cos, sin, q.stride(2), q.stride(1), k.stride(2), k.stride(1),
            q_out.stride(1), k_out.stride(1), cos.stride(1), heads, k.shape[1], back,
            triton.next_power_of_2(heads), triton.next_power_of_2(k.shape[1]),
            width // 2, triton.next_power_of_2(width // 2),
        )  # fmt: skip
    return q_out, k_out


def _room(q: Tensor, k: Tensor, together: bool) -> tuple[Tensor, Tensor]:
    """Where turned heads go: gradients side by side, so that one product can read both."""
    _, heads, tokens, width = q.shape
    if together:
        both = q.new_empty(1, tokens, heads + k.shape[1], width)
        return both[:, :, :heads], both[:, :, heads:]
    return q.new_empty(1, tokens, heads, width), k.new_empty(1, tokens, k.shape[1], width)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _turned(q, k, cos, sin, False)  # no views: they could not be changed in place

    @staticmethod
    @alone
    def backward(ctx: Any, d_q: Tensor, d_k: Tensor) -> tuple[Tensor, Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        d_q, d_k = _turned(d_q.transpose(1, 2), d_k.transpose(1, 2), cos, sin, True)
        return d_q.transpose(1, 2), d_k.transpose(1, 2), None, None


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turn queries [1, H, T, D] and keys [1, Hkv, T, D] by their positions' angles [1, T, D]."""
    turned: Any = _Rotary.apply(q, k, cos, sin)
    return turned[0].transpose(1, 2), turned[1].transpose(1, 2)
