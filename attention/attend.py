"""The one attention function: packed training rows, prefills, decodes and any mix of them.

attend ─▶ choose a backend ─┬─ no pages ─▶ packed: keys are this step's tokens; differentiable
                            └─ pages ────▶ write this step's keys and values, then read all of them
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backends import choice
from .backends.ask import Ask, Scores
from .backends.write import write
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
    backend: str | None = None,
) -> Tensor:
    """Attend q [T, H, Dk] to k [T, Hkv, Dk], v [T, Hkv, Dv]: causal inside each sequence.

    Args:
        layer: whose pages to use.
        window: number of keys a query sees, itself included.
        sinks: [H], a logit per head that takes weight and gives no value.
        backend: the name of the one to use; else the best that can.
    """
    scores = Scores(q.shape[-1] ** -0.5 if scale is None else scale, window, softcap, sinks)
    pages = varlen.pages
    if pages is None:
        chosen = choice.choose(_ask(q, k, v, scores, 0, False), backend)
        return choice.module(chosen).packed(q, k, v, varlen, scores)
    keys, values = pages.cache.layer(layer)
    write(k, v, keys, values, pages.slots)
    q = q.to(keys.dtype)
    ask = _ask(q, keys, values, scores, keys.shape[1], varlen.max_length == 1)
    chosen = choice.choose(ask, backend)
    return choice.module(chosen).paged(q, keys, values, varlen, scores).to(v.dtype)


def _ask(q: Tensor, k: Tensor, v: Tensor, scores: Scores, page_size: int, decode: bool) -> Ask:
    return Ask(
        device=q.device.type,
        dtype=q.dtype,
        heads=q.shape[1],
        kv_heads=k.shape[-2],
        key_dim=q.shape[2],
        value_dim=v.shape[-1],
        grad=torch.is_grad_enabled() and not page_size and q.requires_grad,
        window=scores.window is not None,
        softcap=scores.softcap is not None,
        sinks=scores.sinks is not None,
        page_size=page_size,
        decode=decode,
    )
