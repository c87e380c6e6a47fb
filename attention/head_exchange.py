"""Sequence parallelism, called by `attend` (DeepSpeed-Ulysses): exchange tokens for heads and back.

    rank 0   tokens 0..3, all heads  ─┐ all-to-all ┌─▶  all tokens, heads 0..1 ─▶ attend ─┐
    rank 1   tokens 4..7, all heads  ─┘            └─▶  all tokens, heads 2..3 ─▶ attend ─┤
                                                                                          │
    rank 0   tokens 0..3, all heads  ◀────────────────────────── all-to-all ◀─────────────┘

A head attends within the boundaries of the whole row, so every backend, window, soft cap and sink
works as on one rank. All other layers work on each token alone and see this rank's tokens only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def attend_whole_row(
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    group: Any,
) -> Tensor:
    """Attend q [T/P, H, Dk] to k, v [T/P, Hkv, D] of all P ranks of a group; [T/P, H, Dv].

    attend: computes all tokens of the row, for this rank's heads.
    """
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return attend(q, k, v, sinks)
    heads = q.shape[1] // ranks
    copies = kv_copies(q.shape[1], k.shape[1], ranks)
    if copies > 1:
        k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
    if sinks is not None:
        first = dist.get_rank(group) * heads
        sinks = sinks[first : first + heads]
    q, k, v = _to_heads((q, k, v), group, ranks)
    return _to_tokens(attend(q, k, v, sinks), group, ranks)


def kv_copies(heads: int, kv_heads: int, ranks: int) -> int:
    """Return how often each key head is repeated so that every rank has those of its queries.

    >>> kv_copies(8, 4, 2), kv_copies(8, 2, 4), kv_copies(6, 3, 2), kv_copies(8, 1, 8)
    (1, 2, 2, 8)
    """
    if heads % ranks:
        sizes = [size for size in range(1, heads + 1) if heads % size == 0]
        raise ValueError(
            f"{heads} attention heads cannot be shared by {ranks} sequence-parallel ranks: use one "
            f"of {', '.join(map(str, sizes))}"
        )
    shared = heads // kv_heads
    return next(n for n in range(1, shared + 1) if shared % n == 0 and kv_heads * n % ranks == 0)


def _to_heads(parts: tuple[Tensor, ...], group: Any, ranks: int) -> list[Tensor]:
    """[T/P, H, D] -> [T, H/P, D] for each part, in one exchange."""
    tokens = parts[0].shape[0]
    columns = [part.reshape(tokens, ranks, -1) for part in parts]
    rows = torch.cat(columns, -1).transpose(0, 1)
    whole = _AllToAll.apply(rows, group).flatten(0, 1)
    split = whole.split([column.shape[-1] for column in columns], -1)
    return [
        flat.reshape(tokens * ranks, part.shape[1] // ranks, part.shape[2])
        for flat, part in zip(split, parts, strict=True)
    ]


def _to_tokens(out: Tensor, group: Any, ranks: int) -> Tensor:
    """[T, H/P, D] -> [T/P, H, D]."""
    rows = out.reshape(ranks, -1, *out.shape[1:])
    return _AllToAll.apply(rows, group).transpose(0, 1).flatten(1, 2)


class _AllToAll(torch.autograd.Function):
    """Send row r to rank r of a group, and receive as many; the backward sends gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _exchange(rows, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _exchange(grads[0], ctx.group), None


def _exchange(rows: Tensor, group: Any) -> Tensor:
    rows = rows.contiguous()
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows, group=group)
    return received
