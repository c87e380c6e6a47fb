"""Rotary embeddings of queries and keys with their backward: one kernel that turns either way."""

# Triton launches with what its kernels declare, plus settings of its own.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _turn(
    x, out, cos, sin, x_token, x_head, angle_token, heads,
    BACK: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head, place = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
    inside, side = (head < heads) & (place < HALF), place < HALF
    at = x + token * x_token + head * x_head + place
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    turn = token * angle_token + place
    cos1 = tl.load(cos + turn, mask=side, other=0.0).to(tl.float32)
    cos2 = tl.load(cos + turn + HALF, mask=side, other=0.0).to(tl.float32)
    sin1 = tl.load(sin + turn, mask=side, other=0.0).to(tl.float32)
    sin2 = tl.load(sin + turn + HALF, mask=side, other=0.0).to(tl.float32)
    to = out + (token * heads + head) * (2 * HALF) + place
    if BACK:
        tl.store(to, first * cos1 + second * sin2, mask=inside)
        tl.store(to + HALF, second * cos2 - first * sin1, mask=inside)
    else:
        tl.store(to, first * cos1 - second * sin1, mask=inside)
        tl.store(to + HALF, second * cos2 + first * sin2, mask=inside)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    _, heads, tokens, width = x.shape
    if x.stride(-1) != 1:
        x = x.contiguous()
    out = torch.empty(1, tokens, heads, width, dtype=x.dtype, device=x.device)
    if tokens:
        _turn[(tokens,)](
            x, out, cos, sin, x.stride(2), x.stride(1), cos.stride(1), heads, back,
            triton.next_power_of_2(heads), width // 2, triton.next_power_of_2(width // 2),
        )  # fmt: skip
    return out.transpose(1, 2)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _turned(q, cos, sin, False), _turned(k, cos, sin, False)

    @staticmethod
    def backward(ctx: Any, d_q: Tensor, d_k: Tensor) -> tuple[Tensor, Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        return _turned(d_q, cos, sin, True), _turned(d_k, cos, sin, True), None, None


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turn queries [1, H, T, D] and keys [1, Hkv, T, D] by their positions' angles [1, T, D]."""
    turned: Any = _Rotary.apply(q, k, cos, sin)
    return turned
