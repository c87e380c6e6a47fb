"""PyTorch's own scaled dot product attention, sequence by sequence: runs everywhere.

Packed rows are split, attended one sequence at a time and joined. Over pages, sequences with a
single query (decodes) go together: bucketed by length, their pages gathered into one padded batch,
so that sixty-four decodes cost a few calls and not sixty-four.

    lengths [5, 900, 7, 6, 700]  ->  [5, 7, 6 | padded to 7] and [900, 700 | padded to 900]
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ..reference import visible
from ..varlen import Varlen
from .ask import Ask, Scores


def why_not(ask: Ask) -> str | None:
    return None


def packed(q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, scores: Scores) -> Tensor:
    """Attend inside each sequence of a packed row."""
    bounds = varlen.cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(bounds) if end > start]
    parts = []
    # split, not slices: its backward joins the parts once, a slice's fills T zeros each
    for q1, k1, v1 in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        batch = [x.transpose(0, 1)[None] for x in (q1, k1, v1)]
        parts.append(_rectangle(*batch, scores=scores, mask=None)[0].transpose(0, 1))
    return torch.cat(parts) if parts else q.new_zeros(0, q.shape[1], v.shape[-1])


def paged(q: Tensor, keys: Tensor, values: Tensor, varlen: Varlen, scores: Scores) -> Tensor:
    """Attend each sequence to the keys in its pages."""
    pages = varlen.pages
    assert pages is not None
    bounds = tuple(varlen.cu_seqlens.tolist())
    lengths = tuple(pages.lengths.tolist())
    size = keys.shape[1]
    out = q.new_zeros(q.shape[0], q.shape[1], values.shape[-1])
    for group in _plan(bounds, lengths, scores.window, str(q.device)):
        used = pages.table[group.sequences[:, None], group.places // size].long()
        slots = (used * size + group.places % size).flatten()
        k, v = (_rows(x.flatten(0, 1), slots, len(used)) for x in (keys, values))
        queries = _rows(q, group.rows, len(used))
        mixed = _rectangle(queries, k, v, scores, group.mask)
        out.index_copy_(0, group.rows, mixed.transpose(1, 2).flatten(0, 1))
    return out


def _rows(x: Tensor, index: Tensor, count: int) -> Tensor:
    """Gather rows of [T, H, D] into a batch [count, H, L, D]."""
    return x.index_select(0, index).view(count, -1, *x.shape[1:]).transpose(1, 2)


class _Group:
    """Sequences of one padded batch: which rows and pages they take, and who sees what."""

    def __init__(
        self,
        members: Sequence[int],
        bounds: Sequence[int],
        lengths: Sequence[int],
        window: int | None,
        device: str,
    ):
        longest = max(lengths[i] for i in members)
        self.sequences = torch.tensor(members, device=device)
        own = torch.tensor([lengths[i] for i in members], device=device)[:, None]
        # shorter members repeat their last key: what else lies in a page is not read, even masked
        self.places = torch.arange(longest, device=device).expand(len(members), -1).minimum(own - 1)
        rows = [row for i in members for row in range(bounds[i], bounds[i + 1])]
        self.rows = torch.tensor(rows, device=device)
        queries = len(rows) // len(members)
        self.mask = None
        if len(members) == 1 and 1 < queries == longest:
            return  # a whole prompt: plainly causal, which the fused function computes in half
        masks = [
            F.pad(visible(queries, lengths[i], window, device), (0, longest - lengths[i]))
            for i in members
        ]
        self.mask = torch.stack(masks)[:, None]


@lru_cache(maxsize=16)
def _plan(
    bounds: tuple[int, ...],
    lengths: tuple[int, ...],
    window: int | None,
    device: str,
) -> list[_Group]:
    """Decodes in buckets of similar length, longer queries one by one; once for all layers."""
    buckets: dict[object, list[int]] = {}
    for index, length in enumerate(lengths):
        queries = bounds[index + 1] - bounds[index]
        if queries and length:
            single = queries == 1
            key = ((length - 1).bit_length() if single else 0, -1 if single else index)
            buckets.setdefault(key, []).append(index)
    return [_Group(members, bounds, lengths, window, device) for members in buckets.values()]


def _rectangle(q: Tensor, k: Tensor, v: Tensor, scores: Scores, mask: Tensor | None) -> Tensor:
    """Attend a batch [N, H, L, D]; without a mask, causally, with as many keys as queries."""
    if scores.softcap is not None or scores.sinks is not None:
        return _written_out(q, k, v, scores, mask)
    if mask is None and scores.window is not None and scores.window < q.shape[2]:
        mask = visible(q.shape[2], k.shape[2], scores.window, q.device)
    group = q.shape[1] // k.shape[1]
    if group > 1 and q.shape[2] == 1:  # a decode: the group's heads are rows of one product
        rows = q.reshape(q.shape[0], k.shape[1], group, q.shape[3])
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scores.scale)
        return out.reshape(*q.shape[:3], v.shape[3])
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scores.scale, enable_gqa=group > 1
    )


def _written_out(q: Tensor, k: Tensor, v: Tensor, scores: Scores, mask: Tensor | None) -> Tensor:
    """Softcap and sinks, which the fused function does not know."""
    if mask is None:
        mask = visible(q.shape[2], k.shape[2], scores.window, q.device)
    n, heads, queries, _ = q.shape
    rows = q.reshape(n, k.shape[1], -1, queries, q.shape[3])
    logits = (rows @ k[:, :, None].transpose(-1, -2)).float() * scores.scale
    if scores.softcap is not None:
        logits = torch.tanh(logits / scores.softcap) * scores.softcap
    logits = logits.masked_fill(~(mask if mask.ndim == 2 else mask[:, :, None]), -torch.inf)
    if scores.sinks is not None:
        sink = scores.sinks.float().view(1, k.shape[1], -1, 1, 1).expand(n, -1, -1, queries, 1)
        logits = torch.cat([logits, sink], -1)
    weights = torch.softmax(logits, -1)[..., : k.shape[2]].to(v.dtype)
    return (weights @ v[:, :, None]).reshape(n, heads, queries, v.shape[3])
