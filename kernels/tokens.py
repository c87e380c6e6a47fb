"""Triton kernels at both ends of a step: which tokens go in, and the likeliest that come out.

A token the host does not know yet is named by its slot, below zero. Of logits, parts of rows are
searched first, then their best; among equals the first wins, and a row with a NaN yields -1.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _best(value, token):
    """Largest value and the first token that has it; NaN, if there is one, is the largest."""
    broken = tl.max((value != value).to(tl.int32), 0) > 0
    top = tl.max(tl.where(value != value, float("-inf"), value), 0)
    first = tl.min(tl.where(value == top, token, 1 << 30), 0)
    return tl.where(broken, float("nan"), top), first


@triton.jit
def _parts(logits, values, tokens, vocabulary, stride, share, SHARE: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = part * share + tl.arange(0, SHARE)
    inside = (tl.arange(0, SHARE) < share) & (place < vocabulary)
    value = tl.load(logits + row * stride + place, mask=inside, other=float("-inf"))
    top, first = _best(value.to(tl.float32), place)
    tl.store(values + row * tl.num_programs(1) + part, top)
    tl.store(tokens + row * tl.num_programs(1) + part, first)


@triton.jit
def _whole(values, tokens, out, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = row * PARTS + tl.arange(0, PARTS)
    top, first = _best(tl.load(values + at), tl.load(tokens + at))
    tl.store(out + row, tl.where(top != top, -1, first).to(tl.int64))


def likeliest(logits: Tensor) -> Tensor:
    """Token with the largest of each row's logits [R, V]; int64 [R]."""
    rows, vocabulary = logits.shape
    parts = 64 if rows <= 64 else 16
    share = triton.cdiv(vocabulary, parts)
    values = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        block = triton.next_power_of_2(share)
        _parts[(rows, parts)](
            logits, values, tokens, vocabulary, logits.stride(0), share, block,
            num_warps=max(1, min(8, block // 512)),
        )  # fmt: skip
        _whole[(rows,)](values, tokens, out, parts, num_warps=1)
    return out


@triton.jit(do_not_specialize=["count"])
def _resolve(ids, newest, out, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    token = tl.load(ids + place, mask=inside, other=0)
    known = tl.load(newest - 1 - token, mask=inside & (token < 0), other=0)
    tl.store(out + place, tl.where(token < 0, known, token), mask=inside)


def resolve(ids: Tensor, newest: Tensor) -> Tensor:
    """Token ids [T], those below zero looked up: -1 - slot names the newest token of a slot."""
    out = torch.empty_like(ids)
    if len(ids):
        _resolve[(triton.cdiv(len(ids), 1024),)](ids, newest, out, len(ids), 1024)
    return out


@triton.jit
def _embed(ids, weight, out, width, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WIDTH)
    token = tl.load(ids + row)
    value = tl.load(weight + token * width + place, mask=place < width)
    tl.store(out + row * width + place, value, mask=place < width)


def embed(ids: Tensor, weight: Tensor) -> Tensor:
    """Rows [T, N] of a table of embeddings."""
    width = weight.shape[1]
    out = torch.empty(len(ids), width, dtype=weight.dtype, device=weight.device)
    block = triton.next_power_of_2(width)
    _embed[(len(ids),)](ids, weight, out, width, block, num_warps=max(1, min(8, block // 512)))
    return out
