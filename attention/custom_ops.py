"""Attention and KV writes as custom operators, which torch.compile does not trace into.

Eager code calls the backends directly. Under compilation, packed attention, paged reads and writes
appear in the graph as one operator each. Packed rows select their backend when the operator runs,
pages while the graph is traced. The longest sequence is a value, not a shape: one graph serves
every row, whatever its boundaries.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .backends.call_spec import ScoreParams, call_spec
from .backends.kv_write import write
from .backends.selection import BACKEND_MODULES, BACKENDS, select_backend
from .varlen import Pages, Varlen


@torch.library.custom_op(
    "nopad::write_pages", mutates_args=("keys", "values", "key_scales", "value_scales")
)
def write_pages(
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    kv_slots: Tensor,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    write(k, v, keys, values, kv_slots, *_given(key_scales, value_scales))


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
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    # Cache and KV slots are not read: the keys were written before.
    pages = Pages(None, table, lengths, lengths, max_keys)  # pyright: ignore[reportArgumentType]
    varlen = Varlen(cu_seqlens, max_queries, pages)
    score_params = ScoreParams(scale, window, softcap, sinks)
    scales = _given(key_scales, value_scales)
    return BACKEND_MODULES[backend].paged(q, keys, values, varlen, score_params, *scales)


def _given(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


@attend_pages.register_fake
def _(q: Tensor, keys: Tensor, values: Tensor, *rest) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], values.shape[-1])


def attend_packed(q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, params: ScoreParams) -> Tensor:
    """Attend inside each sequence of a packed row, in a graph that torch.compile traces."""
    max_length: Any = varlen.max_length
    if not isinstance(max_length, Tensor):
        max_length = torch.tensor(max_length)
    grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    tensors = (q, k, v, params.sinks, varlen.cu_seqlens, max_length)
    return packed(*tensors, params.scale, params.window, params.softcap, params.causal, grad)[0]


@torch.library.custom_op("nopad::packed", mutates_args=())
def packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_seqlens: Tensor,
    max_length: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    causal: bool,
    grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the log-sum-exp in the layout of the backend, and the backend's number.

    max_length: int64 [], on the host.
    """
    varlen, score_params = (
        Varlen(cu_seqlens, int(max_length)),
        ScoreParams(scale, window, softcap, sinks, causal),
    )
    name = select_backend(call_spec(q, k, v, score_params, varlen, grad))
    out, lse = BACKEND_MODULES[name].forward(q, k, v, varlen, score_params)
    return out.contiguous(), lse.contiguous().flatten(), torch.tensor(BACKENDS.index(name))


@packed.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest) -> tuple[Tensor, Tensor, Tensor]:
    tokens, heads, _ = q.shape
    lse = q.new_empty(tokens * heads, dtype=torch.float32)
    return q.new_empty(tokens, heads, v.shape[-1]), lse, torch.empty((), dtype=torch.int64)


@torch.library.custom_op("nopad::packed_backward", mutates_args=())
def packed_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    cu_seqlens: Tensor,
    max_length: Tensor,
    backend: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    varlen, score_params = (
        Varlen(cu_seqlens, int(max_length)),
        ScoreParams(scale, window, softcap, sinks, causal),
    )
    module = BACKEND_MODULES[BACKENDS[int(backend)]]
    gradients = module.backward(grad, q, k, v, out, lse, varlen, score_params)
    # As the graph assumes: torch's kernels give gradients the strides of their tensors.
    dq, dk, dv, *rest = (gradient.contiguous() for gradient in gradients)
    return dq, dk, dv, rest[0] if rest else q.new_empty(0)


@packed_backward.register_fake
def _(grad, q, k, v, out, lse, sinks, *rest):
    dsinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _save(ctx, inputs, output):
    q, k, v, sinks, cu_seqlens, max_length, scale, window, softcap, causal, _ = inputs
    out, lse, backend = output
    ctx.save_for_backward(q, k, v, out, lse, sinks, cu_seqlens, max_length, backend)
    ctx.mark_non_differentiable(lse, backend)
    ctx.params = scale, window, softcap, causal


def _backward(ctx, grad, *_):
    tensors = ctx.saved_tensors  # a checkpoint lets them be read once
    dq, dk, dv, dsinks = packed_backward(grad.contiguous(), *tensors, *ctx.params)
    return dq, dk, dv, dsinks if dsinks.numel() else None, *[None] * 7


packed.register_autograd(_backward, setup_context=_save)
