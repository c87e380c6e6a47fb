"""Custom operators for torch.compile: calls that it must not trace, with known output shapes.

Eager code calls the backends directly. Under compilation, paged reads and writes and packed SDPA,
whose loops depend on data, appear in the graph as one operator each, so that a model compiles to
one graph without breaks. The packed calls of the kernel libraries are traced as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backends import sdpa
from .backends.call_spec import ScoreParams
from .backends.kv_write import write
from .backends.sdpa_backward import packed_backward
from .backends.selection import BACKEND_MODULES
from .varlen import Pages, Varlen


@torch.library.custom_op("nopad::write_pages", mutates_args=("keys", "values"))
def write_pages(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, kv_slots: Tensor) -> None:
    write(k, v, keys, values, kv_slots)


@torch.library.custom_op("nopad::attend_pages", mutates_args=())
def attend_pages(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    table: Tensor,
    lengths: Tensor,
    max_queries: int,
    max_keys: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    backend: str,
) -> Tensor:
    pages = Pages(None, table, lengths, lengths, max_keys)  # pyright: ignore[reportArgumentType]
    varlen = Varlen(cu_seqlens, max_queries, pages)
    score_params = ScoreParams(scale, window, softcap, sinks)
    return BACKEND_MODULES[backend].paged(q, keys, values, varlen, score_params)


@attend_pages.register_fake
def _(q: Tensor, keys: Tensor, values: Tensor, *rest) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], values.shape[-1])


@torch.library.custom_op("nopad::sdpa_packed", mutates_args=())
def sdpa_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    score_params = ScoreParams(scale, window, softcap, sinks)
    return sdpa.packed(q, k, v, Varlen(cu_seqlens, max_length), score_params).contiguous()


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
    max_length: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    score_params = ScoreParams(scale, window, softcap, sinks)
    return packed_backward(grad, q, k, v, Varlen(cu_seqlens, max_length), score_params)


@sdpa_packed_backward.register_fake
def _(grad, q, k, v, cu_seqlens, max_length, scale, window, softcap, sinks):
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _save(ctx, inputs, output):
    q, k, v, cu_seqlens, max_length, scale, window, softcap, sinks = inputs
    ctx.save_for_backward(q, k, v, cu_seqlens, sinks)
    ctx.params = (max_length, scale, window, softcap)


def _backward(ctx, grad):
    q, k, v, cu_seqlens, sinks = ctx.saved_tensors
    grads = torch.ops.nopad.sdpa_packed_backward(grad, q, k, v, cu_seqlens, *ctx.params, sinks)
    return *grads[:3], None, None, None, None, None, None if sinks is None else grads[3]


sdpa_packed.register_autograd(_backward, setup_context=_save)
