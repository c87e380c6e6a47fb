"""The one attention function: packed training rows, prefills, decodes and any mix of them.

attend ─▶ choose a backend ─┬─ no pages ─▶ packed: keys are this step's tokens; differentiable
                            └─ pages ────▶ write this step's keys and values, then read all of them
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import custom_ops
from .backends import selection
from .backends.call_spec import ScoreParams
from .backends.kv_write import write
from .varlen import Varlen

_MANY = 8192
_ROOM = 64
"""Places per token that sequences, all as long as the longest allowed, may take for cuDNN: its
backward wants a float for each head and place, a gigabyte a layer for many empty sequences."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    varlen: Varlen,
    *,
    layer: int = 0,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Attend q [T, H, Dk] to k [T, Hkv, Dk], v [T, Hkv, Dv]: causal inside each sequence.

    layer: whose pages to use.
    window: number of keys a query sees, itself included.
    sinks: [H], a logit per head that takes weight and gives no value.
    backend: the name of the one to use; else the best that can.
    """
    scaling: float = q.shape[-1] ** -0.5 if scale is None else scale
    scores = ScoreParams(scaling, window, softcap, sinks)
    rule = (scaling, window, softcap, sinks)
    pages = varlen.pages
    if pages is None:
        chosen = selection.select(_facts(q, k, v, rule, varlen), backend)
        if chosen == "sdpa" and torch.compiler.is_compiling():
            return custom_ops.sdpa_packed(q, k, v, varlen.cu_seqlens, varlen.max_length, *rule)
        return selection.module(chosen).packed(q, k, v, varlen, scores)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise ValueError("pages keep no gradients: call the model inside torch.no_grad()")
    keys, values = pages.cache.layer(layer)
    q = q.to(keys.dtype)
    facts = _facts(q, keys, values, rule, varlen)
    chosen = selection.select(facts, backend)
    if torch.compiler.is_compiling():
        custom_ops.write_pages(k, v, keys, values, pages.slots)
        where = (varlen.cu_seqlens, pages.table, pages.lengths)
        bounds = (varlen.max_length, pages.max_length)
        out = custom_ops.attend_pages(q, keys, values, *where, *bounds, *rule, chosen)
    else:
        write(k, v, keys, values, pages.slots)
        out = selection.module(chosen).paged(q, keys, values, varlen, scores)
    return out.to(v.dtype)


def attend_cached(q: Tensor, varlen: Varlen, *, layer: int, scale: float) -> Tensor:
    """Attend q [T, H, Dk] to pages that hold this step's keys and values already."""
    assert varlen.pages is not None
    keys, values = varlen.pages.cache.layer(layer)
    rule = (scale, None, None, None)
    facts = _facts(q, keys, values, rule, varlen)
    return selection.module(selection.select(facts)).paged(
        q, keys, values, varlen, ScoreParams(*rule)
    )


def _facts(q: Tensor, k: Tensor, v: Tensor, rule: tuple, varlen: Varlen) -> tuple:
    """The fields of an `CallSpec`, in order."""
    page_size = 0 if varlen.pages is None else k.shape[1]
    _, window, softcap, sinks = rule
    # Any of the three: an adapter on the values alone leaves queries without a gradient.
    needed = q.requires_grad or k.requires_grad or v.requires_grad
    grad = torch.is_grad_enabled() and not page_size and needed
    many, tokens, places = False, q.shape[0], len(varlen.cu_seqlens) * varlen.max_length
    # An `if`: torch.compile guards on it, once.
    if not page_size and tokens >= _MANY and places <= _ROOM * tokens:
        many = True
    return (
        q.device.type,
        q.dtype,
        q.shape[1],
        k.shape[-2],
        q.shape[2],
        v.shape[-1],
        grad,
        window is not None,
        softcap is not None,
        sinks is not None,
        page_size,
        page_size > 0 and varlen.max_length == 1,
        many,
    )
