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
    out = q.new_zeros(q.shape[0], q.shape[1], values.shape[-1])
    for group in _plan(bounds, lengths, keys.shape[1], scores.window, str(q.device)):
        used = pages.table[group.sequences[:, None], group.pages]
        k, v = (_gathered(x, used, group) for x in (keys, values))
        queries = q.index_select(0, group.rows).view(len(used), -1, *q.shape[1:]).transpose(1, 2)
        mixed = _rectangle(queries, k, v, scores, group.mask)
        out.index_copy_(0, group.rows, mixed.transpose(1, 2).flatten(0, 1))
    return out


def _gathered(cache: Tensor, used: Tensor, group: _Group) -> Tensor:
    """Pages [pages, size, H, D] as a batch [n, H, L, D]; what lies past a sequence is blanked.

    Masking it would not do: another request may have left a NaN there.
    """
    rows = cache.index_select(0, used.flatten()).flatten(0, 1)
    if group.past_end is not None:
        rows.index_fill_(0, group.past_end, 0)
    return rows.view(len(used), -1, *cache.shape[2:])[:, : group.length].transpose(1, 2)


class _Group:
    """Sequences of one padded batch: which rows and pages they take, and who sees what."""

    def __init__(
        self,
        members: Sequence[int],
        bounds: Sequence[int],
        lengths: Sequence[int],
        page_size: int,
        window: int | None,
        device: str,
    ):
        own = torch.tensor([lengths[i] for i in members])[:, None]
        self.length = int(own.max())
        place = torch.arange(self.length)
        count = -(-self.length // page_size)
        self.sequences = torch.tensor(members, device=device)
        self.pages = torch.arange(count).minimum((own - 1) // page_size).to(device)
        rows = [row for i in members for row in range(bounds[i], bounds[i + 1])]
        self.rows = torch.tensor(rows, device=device)
        self.past_end, self.mask = None, None
        if len(members) == 1:
            if 1 < len(rows) < self.length or window is not None:
                self.mask = visible(len(rows), self.length, window, device)
            elif len(rows) == 1:
                self.mask = torch.ones(1, self.length, dtype=torch.bool, device=device)
            return
        past = place >= own
        if past.any():
            slots = torch.arange(len(members))[:, None] * count * page_size + place
            self.past_end = slots[past].to(device)
        seen = ~past if window is None else ~past & (place >= own - window)
        self.mask = seen[:, None, None].to(device)


@lru_cache(maxsize=16)
def _plan(
    bounds: tuple[int, ...],
    lengths: tuple[int, ...],
    page_size: int,
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
    return [
        _Group(members, bounds, lengths, page_size, window, device) for members in buckets.values()
    ]


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
