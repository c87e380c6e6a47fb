"""What torch.compile must not look into: whole operations with a known shape of result.

Eager code calls the backends directly. Under compilation, paged reads and writes and the SDPA of a
packed row, whose loops depend on data, appear in the graph as one operation each, so that a model
compiles to one graph without breaks. The kernel libraries' own packed calls are traced as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backends import sdpa, selection
from .backends.call_spec import ScoreParams
from .backends.kv_write import write
from .backends.sdpa_backward import packed_backward
from .varlen import Pages, Varlen


@torch.library.custom_op("nopad::write_pages", mutates_args=("keys", "values"))
def write_pages(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    write(k, v, keys, values, slots)


@torch.library.custom_op("nopad::attend_pages", mutates_args=())
def attend_pages(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    table: Tensor,
    lengths: Tensor,
    longest_query: int,
    longest_key: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    backend: str,
) -> Tensor:
    pages = Pages(None, table, lengths, lengths, longest_key)  # pyright: ignore[reportArgumentType]
    varlen = Varlen(cu_seqlens, longest_query, pages)
    scores = ScoreParams(scale, window, softcap, sinks)
    return selection.module(backend).paged(q, keys, values, varlen, scores)


@attend_pages.register_fake
def _(q: Tensor, keys: Tensor, values: Tensor, *rest) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], values.shape[-1])


@torch.library.custom_op("nopad::sdpa_packed", mutates_args=())
def sdpa_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    return sdpa.packed(
        q, k, v, Varlen(cu_seqlens, longest), ScoreParams(scale, window, softcap, sinks)
    ).contiguous()


@sdpa_packed.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[-1])


@torch.library.custom_op("nopad::sdpa_packed_backward", mutates_args=())
def sdpa_packed_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scores = ScoreParams(scale, window, softcap, sinks)
    return packed_backward(grad, q, k, v, Varlen(cu_seqlens, longest), scores)


@sdpa_packed_backward.register_fake
def _(grad, q, k, v, cu_seqlens, longest, scale, window, softcap, sinks):
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _save(ctx, inputs, output):
    q, k, v, cu_seqlens, longest, scale, window, softcap, sinks = inputs
    ctx.save_for_backward(q, k, v, cu_seqlens, sinks)
    ctx.rule = (longest, scale, window, softcap)


def _backward(ctx, grad):
    q, k, v, cu_seqlens, sinks = ctx.saved_tensors
    grads = torch.ops.nopad.sdpa_packed_backward(grad, q, k, v, cu_seqlens, *ctx.rule, sinks)
    return *grads[:3], None, None, None, None, None, None if sinks is None else grads[3]


sdpa_packed.register_autograd(_backward, setup_context=_save)
