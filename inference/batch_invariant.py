"""Batch-invariant arithmetic: what a token computes does not depend on what else is in the step.

Products of other shapes add up in another order, so a token's logits differ in the last bits with
the company it has, and from those of the training forward. Here every product has one shape, one
row on a CPU and a block of rows on a GPU, and attention is over keys padded to one length: the same
sums in the same order always. On a GPU, where the cut of a reduction depends on how many rows it
has, means, sums of exponentials and attention go through such blocks as well. The engine's own
kernels and graphs stay out of it.

    with invariant(longest=512):
        compare_logprobs(model, Engine(model), prompts)    # 0 on a CPU in float32: rounding was all of it

It is there to tell rounding from mistakes: about twice the time for a tiny model, far more for a
large one. Models whose layers are `nn.Linear` and attention without soft caps or sinks; engines
that are made inside.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, partialmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention import visible
from ..attention.backends import sdpa, selection
from . import executor

_LEAST = 2
"""Rows of a batched product: a single one is computed by another routine."""
_BLOCK = 64
"""Rows of every product on a GPU."""


@contextmanager
def invariant(longest: int) -> Iterator[None]:
    """Compute products in one shape, and attention over `longest` keys, in this process."""
    with ExitStack() as stack:
        _replace(F, "linear", partial(_linear, F.linear), stack)
        _replace(F, "scaled_dot_product_attention", partial(_attention, longest), stack)
        _replace(torch.Tensor, "mean", partialmethod(_by_rows, torch.Tensor.mean), stack)
        _replace(torch.Tensor, "logsumexp", partialmethod(_by_rows, torch.Tensor.logsumexp), stack)
        _replace(sdpa, "sharing", False, stack)
        # A trial's sequences may be longer than `longest`, and there is no other backend to try.
        _replace(selection, "_trial", lambda name, ask: None, stack)
        _replace(executor, "verified_ops", lambda *args, **named: [], stack)
        before = os.environ.get("NOPAD_ATTENTION")
        os.environ["NOPAD_ATTENTION"] = "sdpa"
        try:
            yield
        finally:
            del os.environ["NOPAD_ATTENTION"]
            if before is not None:
                os.environ["NOPAD_ATTENTION"] = before


def _replace(place: Any, name: str, value: Any, stack: ExitStack) -> None:
    if name in vars(place):
        stack.callback(setattr, place, name, vars(place)[name])
    else:
        stack.callback(delattr, place, name)
    setattr(place, name, value)


def _linear(
    plain: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    shape = (*x.shape[:-1], len(weight))
    if x.is_cuda:
        out = _in_blocks(lambda block: plain(block, weight), x)
    else:
        rows = x.reshape(-1, 1, x.shape[-1])
        several = rows.expand(_LEAST, -1, -1) if len(rows) == 1 else rows
        out = torch.bmm(several, weight.t().expand(len(several), -1, -1))[: len(rows)]
    out = out.reshape(shape)
    return out if bias is None else out + bias


def _by_rows(x: Tensor, plain: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
    """Reduce rows in blocks; reductions over anything but the last dimension stay as they are."""
    dim = args[0] if args else options.get("dim")
    if not x.is_cuda or dim not in (-1, (-1,), [-1]):
        return plain(x, *args, **options)
    out = _in_blocks(lambda block: plain(block, *args, **options), x)
    keep = args[1] if len(args) > 1 else options.get("keepdim", False)
    return out.reshape(*x.shape[:-1], *([1] if keep else []))


def _in_blocks(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a call to the rows of x, always to as many of them."""
    rows = x.reshape(-1, x.shape[-1])
    whole = F.pad(rows, (0, 0, 0, -len(rows) % _BLOCK))
    return torch.cat([call(block) for block in whole.split(_BLOCK)])[: len(rows)]


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
    """Attend query by query, over keys padded to `longest`; on a GPU a block of them at a time."""
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
    if query.is_cuda:
        return _attend_in_blocks(query, key, value, bias, factor)
    rows = [(query[..., i, None, :] * key).sum(-1) for i in range(queries)]
    seen = (torch.stack(rows, -2) * factor + bias).softmax(-1)
    return torch.stack([(seen[..., i, :, None] * value).sum(-2) for i in range(queries)], -2)


def _attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, factor: float
) -> Tensor:
    """Attend [N, H, L, D] in blocks of queries, whatever sequences and heads they belong to."""
    n, heads, queries, _ = query.shape
    rows, keys, values = query.flatten(0, 2), key.flatten(0, 1), value.flatten(0, 1)
    biases = bias.expand(n, heads, queries, -1).flatten(0, 2)
    each = torch.arange(len(rows), device=query.device)
    found = []
    for block in F.pad(each, (0, -len(rows) % _BLOCK)).split(_BLOCK):
        k, v = (x[block // queries] for x in (keys, values))
        scores = (rows[block, None] * k).sum(-1) * factor + biases[block]
        found.append((scores.softmax(-1)[..., None] * v).sum(-2))
    return torch.cat(found)[: len(rows)].view(n, heads, queries, -1)
