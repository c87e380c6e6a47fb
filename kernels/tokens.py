"""Kernels around a generation step: input copy, last tokens, embedding lookup, argmax.

Argmax takes two kernels: the first searches chunks of each row, the second their maxima. The first
of equal maxima wins, and a row with a NaN yields -1.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ARGMAX_BLOCK = 2048
"""Logits that a program of one warp searches; fastest on an H200 for 16 to 512 rows."""


@triton.jit
def _first_max(value, token):
    """Return the maximum and the first token that has it; the maximum is NaN if any value is."""
    has_nan = tl.max((value != value).to(tl.int32), 0) > 0
    maximum = tl.max(tl.where(value != value, float("-inf"), value), 0)
    first = tl.min(tl.where(value == maximum, token, 1 << 30), 0)
    return tl.where(has_nan, float("nan"), maximum), first


@triton.jit
def _chunk_max_kernel(logits, maxima, tokens, vocab_size, stride, BLOCK: tl.constexpr):
    row, index = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs = index * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * stride + offs, mask=offs < vocab_size, other=float("-inf"))
    maximum, first = _first_max(value.to(tl.float32), offs)
    tl.store(maxima + row * tl.num_programs(1) + index, maximum)
    tl.store(tokens + row * tl.num_programs(1) + index, first)


@triton.jit(do_not_specialize=["host_width"])
def _row_max_kernel(
    maxima, tokens, out, num_chunks,
    rows, last_tokens, slot, host_tokens, host_width,
    BLOCK: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < num_chunks
    value = tl.load(maxima + row * num_chunks + offs, mask=mask, other=float("-inf"))
    token = tl.load(tokens + row * num_chunks + offs, mask=mask, other=1 << 30)
    maximum, first = _first_max(value, token)
    chosen = tl.where(maximum != maximum, -1, first).to(tl.int64)
    tl.store(out + row, chosen)
    if KEEP:
        tl.store(last_tokens + tl.load(rows + row), tl.maximum(chosen, 0))
        index = tl.load(slot)
        if (index >= 0) & (row < host_width):
            tl.store(host_tokens + index * host_width + row, chosen)


def argmax(logits: Tensor) -> Tensor:
    """Return the token with the largest logit of each row of [R, V]; int64 [R]."""
    return _argmax(logits)


def argmax_into(
    logits: Tensor, rows: Tensor, last_tokens: Tensor, slot: Tensor, host_tokens: Tensor
) -> Tensor:
    """Return `argmax(logits)`, and keep the tokens for the next step and for the host.

    Args:
        rows: int64 [R], where in `last_tokens` each token goes; 0 is kept for -1.
        slot: int64 [1], the row of `host_tokens` to fill; -1: none.
        host_tokens: int64 [slots, W], pinned: gets the first W tokens.
    """
    return _argmax(logits, rows, last_tokens, slot, host_tokens)


def _argmax(logits: Tensor, *targets: Tensor) -> Tensor:
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, ARGMAX_BLOCK)
    maxima = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=logits.device)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        _chunk_max_kernel[(num_rows, num_chunks)](
            logits, maxima, tokens, vocab_size, logits.stride(0), ARGMAX_BLOCK, num_warps=1
        )  # fmt: skip
        _row_max_kernel[(num_rows,)](
            maxima, tokens, out, num_chunks, *(targets or (out, out, out, out)),
            targets[-1].shape[1] if targets else 0, triton.next_power_of_2(num_chunks),
            bool(targets), num_warps=1,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_words"])
def _copy_kernel(source, target, num_words, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num_words
    tl.store(target + offs, tl.load(source + offs, mask=mask), mask=mask)


def copy_words(source: Tensor, target: Tensor) -> None:
    """Copy int64s to the device; `source` may be pinned host memory.

    The caller keeps `source` until the kernel has run: torch does not.
    """
    block = 256
    grid = (triton.cdiv(len(source), block),)
    _copy_kernel[grid](source, target, len(source), block, num_warps=4)


@triton.jit(do_not_specialize=["num_tokens"])
def _fill_kernel(ids, last_tokens, out, num_tokens, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num_tokens
    token = tl.load(ids + offs, mask=mask, other=0)
    last = tl.load(last_tokens - 1 - token, mask=mask & (token < 0), other=0)
    tl.store(out + offs, tl.where(token < 0, last, token), mask=mask)


def fill_last_tokens(ids: Tensor, last_tokens: Tensor) -> Tensor:
    """Replace each placeholder id (-1 - row) by the last token of that row.

    The host schedules a step before it knows the tokens that the previous one sampled.
    """
    out = torch.empty_like(ids)
    if len(ids):
        _fill_kernel[(triton.cdiv(len(ids), 1024),)](ids, last_tokens, out, len(ids), 1024)
    return out


@triton.jit
def _embed_kernel(ids, weight, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    token = tl.load(ids + row)
    value = tl.load(weight + token * width + offs, mask=offs < width)
    tl.store(out + row * width + offs, value, mask=offs < width)


def embed(ids: Tensor, weight: Tensor) -> Tensor:
    """Return the rows [T, N] of an embedding table for ids [T]."""
    width = weight.shape[1]
    out = torch.empty(len(ids), width, dtype=weight.dtype, device=weight.device)
    block = triton.next_power_of_2(width)
    num_warps = max(1, min(8, block // 512))
    _embed_kernel[(len(ids),)](ids, weight, out, width, block, num_warps=num_warps)
    return out
