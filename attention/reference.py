"""Reference attention in plain torch, one sequence at a time, in any precision.

Every backend is compared with it in fp32: a backend's error may be at most twice the error of this
function in the backend's own precision.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from .varlen import Pages, Varlen


def reference(
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
) -> Tensor:
    """Attend like `attend`; with pages, this step's keys must already be written."""
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[-1])
    bounds = varlen.cu_seqlens.tolist()
    for index, (start, end) in enumerate(pairwise(bounds)):
        if start == end:
            continue
        keys, values = k[start:end], v[start:end]
        if varlen.pages is not None:
            keys, values = gather_pages(varlen.pages, layer, index, k.dtype)
        out[start:end] = one_sequence(
            q[start:end], keys, values, scale=scale, window=window, softcap=softcap, sinks=sinks,
            causal=causal,
        )  # fmt: skip
    return out


def gather_pages(pages: Pages, layer: int, index: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the keys and values of one sequence from its pages."""
    length = int(pages.lengths[index])
    table = pages.table[index, : -(-length // pages.cache.page_size)].long()
    keys, values, *scales = (x[table] for x in pages.cache.layer(layer))
    keys, values = (x.to(dtype) for x in (keys, values))
    if scales:  # [pages, Hkv, page_size]
        key_scales, value_scales = (x.to(dtype).transpose(1, 2)[..., None] for x in scales)
        keys, values = keys * key_scales, values * value_scales
    return keys.flatten(0, 1)[:length], values.flatten(0, 1)[:length]


def one_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    causal: bool = True,
) -> Tensor:
    """Attend q [L, H, Dk] to k [S, Hkv, Dk], v [S, Hkv, Dv]; the last query sees the last key."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    softmax_scale: float = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("qhd,khd->hqk", q, k) * softmax_scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    visible = causal_mask(q.shape[0], k.shape[0], window, q.device, causal)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        sink = sinks.to(scores.dtype)[:, None, None].expand(-1, q.shape[0], 1)
        scores = torch.cat([scores, sink], -1)
    weights = torch.softmax(scores, -1)[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, v)


def causal_mask(
    queries: int, keys: int, window: int | None, device: torch.device | str, causal: bool = True
) -> Tensor:
    """bool [queries, keys], True where a query sees a key: causal, bottom-right aligned.

    window: a query sees its last `window` keys only.
    causal: False lets a query see later keys too, and a window extend to both sides.

    >>> causal_mask(2, 4, 2, "cpu").int().tolist()
    [[0, 1, 1, 0], [0, 0, 1, 1]]
    """
    query = torch.arange(keys - queries, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)
    mask = key <= query if causal else torch.ones_like(key > query)
    if window is None:
        return mask
    return mask & (key > query - window) & (key < query + window)
