"""Batch-invariant arithmetic: what a token computes does not depend on what else is in the step.

Products of other shapes add up in another order, so a token's logits differ in the last bits with
the company it has, and from those of the training forward. Here every row of a product is computed
by itself, and attention over keys padded to one length: the same sums in the same order always.

    with invariant(longest=512):
        agreement(model, engine, prompts)       # 0 on a CPU in float32: rounding was all of it

It is there to tell rounding from mistakes: about twice the time for a tiny model, far more for a
large one. Models whose layers are `nn.Linear` and attention without soft caps or sinks, on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.backends import sdpa
from ..attention.reference import visible

_LEAST = 2
"""Rows of a batched product: a single one is computed by another routine."""


@contextmanager
def invariant(longest: int) -> Iterator[None]:
    """Compute linear layers row by row, and attention over `longest` keys, in this process."""
    before = F.linear, F.scaled_dot_product_attention, sdpa.sharing
    F.linear = _linear
    F.scaled_dot_product_attention = partial(_attention, longest)
    sdpa.sharing = False
    try:
        yield
    finally:
        F.linear, F.scaled_dot_product_attention, sdpa.sharing = before


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = x.reshape(-1, 1, x.shape[-1])
    count = len(rows)
    if 0 < count < _LEAST:
        rows = rows.expand(_LEAST, -1, -1)
    out = torch.bmm(rows, weight.t().expand(len(rows), -1, -1))[:count]
    out = out.reshape(*x.shape[:-1], len(weight))
    return out if bias is None else out + bias


def _attention(
    longest: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend query by query, over keys padded to `longest`."""
    queries, keys = query.shape[-2], key.shape[-2]
    if keys > longest:
        raise ValueError(f"a sequence has {keys} keys; raise longest={longest}")
    heads = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(heads, 1) if heads > 1 else x for x in (key, value))
    bias = query.new_zeros(queries, keys) if attn_mask is None else attn_mask
    if is_causal:
        bias = bias.masked_fill(~visible(queries, keys, None, query.device), float("-inf"))
    key, value = (F.pad(x, (0, 0, 0, longest - keys)) for x in (key, value))
    bias = F.pad(bias, (0, longest - keys), value=float("-inf"))
    factor: float = query.shape[-1] ** -0.5 if scale is None else scale
    rows = [(query[..., i, None, :] * key).sum(-1) for i in range(queries)]
    seen = (torch.stack(rows, -2) * factor + bias).softmax(-1)
    return torch.stack([(seen[..., i, :, None] * value).sum(-2) for i in range(queries)], -2)
