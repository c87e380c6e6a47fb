"""Attention inside the sequences of a packed row, forward and backward, with soft caps and windows.

    program        reads                                            writes
    forward        a tile of queries, all keys they see             out, log-sum-exp
    dq             a tile of queries, all keys they see             dq
    dk, dv         a tile of keys, all queries that see them        dk, dv: no atomics, same bits

With S = cap tanh(scale Q Kᵀ / cap) and P = softmax(S), the backward multiplies dS = P (dP - Σ P dP)
by the slope of the cap. Queries, keys and values have one head dim.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_tile import dot_precision, padded_dim


@triton.jit
def _scores(
    q, k, rows, cols, length, scale, softcap, window,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the scores [M, N], -inf where a query does not see a key, and the slope of the cap."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    slope = tl.full(s.shape, 1.0, tl.float32)
    if SOFTCAP:
        tanh = 1.0 - 2.0 / (tl.exp(s * (2.0 / softcap)) + 1.0)
        s, slope = softcap * tanh, 1.0 - tanh * tanh
    visible = (cols[None, :] <= rows[:, None]) & (rows < length)[:, None]
    if WINDOW:
        visible = visible & (cols[None, :] > rows[:, None] - window)
    return tl.where(visible, s, float("-inf")), slope


@triton.jit
def _tile(x, start, rows, length, head, HEADS: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr):
    """Return pointers to rows of a head of x [T, HEADS, D], and which of them exist."""
    dims = tl.arange(0, PAD)
    token = (start + rows).to(tl.int64)
    return (
        x + (token[:, None] * HEADS + head) * D + dims[None, :],
        (rows < length)[:, None] & (dims < D)[None, :],
    )


@triton.jit
def _load_tile(
    x, start, rows, length, head, HEADS: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr
):
    """Return these rows, zeros where they do not exist."""
    pointers, exists = _tile(x, start, rows, length, head, HEADS, D, PAD)
    return tl.load(pointers, mask=exists, other=0.0)


@triton.jit(do_not_specialize=["scale", "softcap", "window", "tokens"])
def _forward_kernel(
    q, k, v, cu_seqlens, out, lse, scale, softcap, window, tokens,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    start = tl.load(cu_seqlens + tl.program_id(0))
    length = tl.load(cu_seqlens + tl.program_id(0) + 1) - start
    first, head = tl.program_id(1) * BLOCK, tl.program_id(2)
    if first >= length:
        return
    rows = first + tl.arange(0, BLOCK)
    q_tile = _load_tile(q, start, rows, length, head, HEADS, D, PAD)
    acc = tl.zeros([BLOCK, PAD], tl.float32)
    m_i = tl.full([BLOCK], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK], tl.float32)
    low = 0
    if WINDOW:
        low = tl.maximum(first - window + 1, 0) // BLOCK * BLOCK
    for key in range(low, tl.minimum(first + BLOCK, length), BLOCK):
        cols = key + tl.arange(0, BLOCK)
        k_tile = _load_tile(k, start, cols, length, head // GROUP, HEADS // GROUP, D, PAD)
        v_tile = _load_tile(v, start, cols, length, head // GROUP, HEADS // GROUP, D, PAD)
        s, _ = _scores(
            q_tile, k_tile, rows, cols, length, scale, softcap, window, WINDOW, SOFTCAP, PRECISION
        )
        m_new = tl.maximum(m_i, tl.max(s, 1))
        floor = tl.where(m_new == float("-inf"), 0.0, m_new)  # of rows that see no key yet
        p = tl.exp(s - floor[:, None])
        alpha = tl.exp(m_i - floor)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision=PRECISION)
        m_i = m_new
    l_i = tl.where(rows < length, l_i, 1.0)
    pointers, exists = _tile(out, start, rows, length, head, HEADS, D, PAD)
    tl.store(pointers, (acc / l_i[:, None]).to(out.dtype.element_ty), mask=exists)
    lse += head.to(tl.int64) * tokens + start
    tl.store(lse + rows, m_i + tl.log(l_i), mask=rows < length)


@triton.jit(do_not_specialize=["scale", "softcap", "window", "tokens"])
def _dq_kernel(
    grad, q, k, v, lse, delta, cu_seqlens, dq, scale, softcap, window, tokens,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    start = tl.load(cu_seqlens + tl.program_id(0))
    length = tl.load(cu_seqlens + tl.program_id(0) + 1) - start
    first, head = tl.program_id(1) * BLOCK, tl.program_id(2)
    if first >= length:
        return
    rows = first + tl.arange(0, BLOCK)
    q_tile = _load_tile(q, start, rows, length, head, HEADS, D, PAD)
    grad_tile = _load_tile(grad, start, rows, length, head, HEADS, D, PAD)
    place = head.to(tl.int64) * tokens + start
    row_lse = tl.load(lse + place + rows, mask=rows < length, other=0.0)
    row_delta = tl.load(delta + place + rows, mask=rows < length, other=0.0)
    acc = tl.zeros([BLOCK, PAD], tl.float32)
    low = 0
    if WINDOW:
        low = tl.maximum(first - window + 1, 0) // BLOCK * BLOCK
    for key in range(low, tl.minimum(first + BLOCK, length), BLOCK):
        cols = key + tl.arange(0, BLOCK)
        k_tile = _load_tile(k, start, cols, length, head // GROUP, HEADS // GROUP, D, PAD)
        v_tile = _load_tile(v, start, cols, length, head // GROUP, HEADS // GROUP, D, PAD)
        s, slope = _scores(
            q_tile, k_tile, rows, cols, length, scale, softcap, window, WINDOW, SOFTCAP, PRECISION
        )
        p = tl.exp(s - row_lse[:, None])
        dp = tl.dot(grad_tile, tl.trans(v_tile), input_precision=PRECISION)
        ds = p * (dp - row_delta[:, None]) * slope * scale
        acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)
    pointers, exists = _tile(dq, start, rows, length, head, HEADS, D, PAD)
    tl.store(pointers, acc.to(dq.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["scale", "softcap", "window", "tokens"])
def _dkv_kernel(
    grad, q, k, v, lse, delta, cu_seqlens, dk, dv, scale, softcap, window, tokens,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    start = tl.load(cu_seqlens + tl.program_id(0))
    length = tl.load(cu_seqlens + tl.program_id(0) + 1) - start
    first, kv_head = tl.program_id(1) * BLOCK, tl.program_id(2)
    if first >= length:
        return
    cols = first + tl.arange(0, BLOCK)
    k_tile = _load_tile(k, start, cols, length, kv_head, HEADS // GROUP, D, PAD)
    v_tile = _load_tile(v, start, cols, length, kv_head, HEADS // GROUP, D, PAD)
    dk_acc = tl.zeros([BLOCK, PAD], tl.float32)
    dv_acc = tl.zeros([BLOCK, PAD], tl.float32)
    end = length
    if WINDOW:
        end = tl.minimum(length, first + BLOCK - 1 + window)
    for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):
        place = start + tokens.to(tl.int64) * head
        for query in range(first, end, BLOCK):
            rows = query + tl.arange(0, BLOCK)
            q_tile = _load_tile(q, start, rows, length, head, HEADS, D, PAD)
            grad_tile = _load_tile(grad, start, rows, length, head, HEADS, D, PAD)
            row_lse = tl.load(lse + place + rows, mask=rows < length, other=0.0)
            row_delta = tl.load(delta + place + rows, mask=rows < length, other=0.0)
            s, slope = _scores(
                q_tile, k_tile, rows, cols, length, scale, softcap, window,
                WINDOW, SOFTCAP, PRECISION,
            )  # fmt: skip
            p = tl.exp(s - row_lse[:, None])
            p_low = tl.trans(p).to(grad_tile.dtype)
            dv_acc = tl.dot(p_low, grad_tile, dv_acc, input_precision=PRECISION)
            dp = tl.dot(grad_tile, tl.trans(v_tile), input_precision=PRECISION)
            ds = p * (dp - row_delta[:, None]) * slope * scale
            ds_low = tl.trans(ds).to(q_tile.dtype)
            dk_acc = tl.dot(ds_low, q_tile, dk_acc, input_precision=PRECISION)
    pointers, exists = _tile(dk, start, cols, length, kv_head, HEADS // GROUP, D, PAD)
    tl.store(pointers, dk_acc.to(dk.dtype.element_ty), mask=exists)
    pointers, exists = _tile(dv, start, cols, length, kv_head, HEADS // GROUP, D, PAD)
    tl.store(pointers, dv_acc.to(dv.dtype.element_ty), mask=exists)


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_length: int,
    scale: float, window: int | None, softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the causal attention [T, H, D] and the log-sum-exp [H, T] of its scores."""
    q, k, v = (x.contiguous() for x in (q, k, v))
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=torch.float32)
    grid, sizes = _launch(q, k, cu_seqlens, max_length, window, softcap)
    scalars = (scale, softcap or 1.0, window or 0, len(q))
    _forward_kernel[(*grid, q.shape[1])](q, k, v, cu_seqlens, out, lse, *scalars, **sizes)
    return out, lse


def packed_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor,
    max_length: int, scale: float, window: int | None, softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v; out, lse: what the forward returned."""
    grad, q, k, v, lse = (x.contiguous() for x in (grad, q, k, v, lse))
    delta = (grad.float() * out.float()).sum(-1).t().contiguous()
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    grid, sizes = _launch(q, k, cu_seqlens, max_length, window, softcap)
    inputs = (grad, q, k, v, lse, delta, cu_seqlens)
    scalars = (scale, softcap or 1.0, window or 0, len(q))
    _dq_kernel[(*grid, q.shape[1])](*inputs, dq, *scalars, **sizes)
    _dkv_kernel[(*grid, k.shape[1])](*inputs, dk, dv, *scalars, **sizes)
    return dq, dk, dv


def _launch(
    q: Tensor, k: Tensor, cu_seqlens: Tensor, max_length: int, window: Any, softcap: Any
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return the first two sizes of the grid, and what the kernels are compiled for."""
    heads, dim = q.shape[1:]
    block = 64 if dim <= 128 and q.itemsize == 2 else 32
    sizes = {
        "HEADS": heads, "GROUP": heads // k.shape[1], "D": dim, "PAD": padded_dim(dim),
        "BLOCK": block, "WINDOW": window is not None, "SOFTCAP": softcap is not None,
        "PRECISION": dot_precision(q), "num_warps": 4 if dim <= 128 else 8, "num_stages": 2,
    }  # fmt: skip
    return (len(cu_seqlens) - 1, triton.cdiv(max(max_length, 1), block)), sizes
