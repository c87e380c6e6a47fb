"""`attend`: attention over packed rows, or over the paged KV cache, which it writes first.

attend ─▶ select a backend ─┬─ no pages ─▶ packed: keys are the step's tokens; differentiable
                            └─ pages ────▶ write the step's keys and values, then read all of them
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import custom_ops
from .backends.call_spec import ScoreParams, call_spec
from .backends.kv_write import write
from .backends.selection import BACKEND_MODULES, select_backend
from .head_exchange import attend_whole_row
from .varlen import Varlen


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
    causal: bool = True,
    backend: str | None = None,
) -> Tensor:
    """Attend q [T, H, Dk] to k [T, Hkv, Dk], v [T, Hkv, Dv]: inside each sequence.

    With `varlen.group`, q, k and v are this rank's part of the T tokens (sequence parallelism).

    Args:
        q: queries [T, H, Dk].
        k: keys [T, Hkv, Dk] of the same tokens.
        v: values [T, Hkv, Dv] of the same tokens.
        varlen: where the sequences begin and, with pages, where all their keys are.
        layer: the layer of the cache to use, with pages.
        scale: positive factor of the scores; default: 1 / sqrt(Dk).
        window: number of keys a query sees, itself included; if not causal, to either side.
        softcap: cap of the scores, c * tanh(score / c).
        sinks: [H], one more logit per head, which takes weight and has no value.
        causal: False lets a query see later keys too, as in encoders; not over pages.
        backend: the name of the backend to use; by default the best that supports the call.
    """
    if varlen.group is not None:
        options: Any = {"layer": layer, "scale": scale, "window": window, "softcap": softcap}
        whole, options["causal"] = replace(varlen, group=None), causal
        return attend_whole_row(
            lambda q, k, v, sinks: attend(q, k, v, whole, sinks=sinks, backend=backend, **options),
            *(q, k, v, sinks, varlen.group),
        )
    softmax_scale: float = q.shape[-1] ** -0.5 if scale is None else scale
    score_params = ScoreParams(softmax_scale, window, softcap, sinks, causal)
    pages = varlen.pages
    if pages is None:
        if torch.compiler.is_compiling():
            return custom_ops.attend_packed(q, k, v, varlen, score_params)
        name = select_backend(call_spec(q, k, v, score_params, varlen), backend)
        return BACKEND_MODULES[name].packed(q, k, v, varlen, score_params)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise ValueError("paged attention has no gradients: call the model inside torch.no_grad()")
    keys, values, *scales = pages.cache.layer(layer)
    q = q.to(pages.cache.dtype)
    name = select_backend(call_spec(q, keys, values, score_params, varlen), backend)
    if torch.compiler.is_compiling():
        custom_ops.write_pages(k, v, keys, values, pages.kv_slots, *scales)
        args = (varlen.cu_seqlens, pages.table, pages.lengths, varlen.max_length, pages.max_length)
        params = (softmax_scale, window, softcap, sinks)
        out = custom_ops.attend_pages(q, keys, values, *args, *params, name, *scales)
    else:
        write(k, v, keys, values, pages.kv_slots, *scales)
        out = BACKEND_MODULES[name].paged(q, keys, values, varlen, score_params, *scales)
    return out.to(v.dtype)


def attend_cached(q: Tensor, varlen: Varlen, *, layer: int, scale: float) -> Tensor:
    """Attend q [T, H, Dk] to pages that already hold the keys and values of this step."""
    assert varlen.pages is not None
    keys, values, *scales = varlen.pages.cache.layer(layer)
    score_params = ScoreParams(scale)
    name = select_backend(call_spec(q, keys, values, score_params, varlen))
    return BACKEND_MODULES[name].paged(q, keys, values, varlen, score_params, *scales)
