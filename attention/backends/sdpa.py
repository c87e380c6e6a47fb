"""PyTorch's own scaled dot product attention, sequence by sequence: runs everywhere.

Packed rows are split, attended one sequence at a time and joined. Over pages, `sdpa_plan` says
which sequences go together, and which pages are read once for several of them; what a query found
in the shared pages and in its own is then joined by the sums of the exponentials:

    out = (e^a · shared + e^b · own) / (e^a + e^b)        a, b: log-sum-exp of the two parts' scores
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ..reference import visible
from ..varlen import Varlen
from .call_spec import CallSpec, NotCapturable, ScoreParams
from .sdpa_batching import Batch, Family, Layout, blind, plan

sharing = True
"""Whether pages that several sequences begin with are read once for all of them."""


def why_not(ask: CallSpec) -> str | None:
    return None


def packed(q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, scores: ScoreParams) -> Tensor:
    """Attend inside each sequence of a packed row."""
    bounds = varlen.cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(bounds) if end > start]
    parts = []
    # split, not slices: its backward joins the parts once, a slice's fills T zeros each
    for q1, k1, v1 in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        batch = [x.transpose(0, 1)[None] for x in (q1, k1, v1)]
        parts.append(_rectangle(*batch, scores=scores, bias=None)[0].transpose(0, 1))
    return torch.cat(parts) if parts else q.new_zeros(0, q.shape[1], v.shape[-1])


def paged(q: Tensor, keys: Tensor, values: Tensor, varlen: Varlen, scores: ScoreParams) -> Tensor:
    """Attend each sequence to the keys in its pages."""
    pages = varlen.pages
    assert pages is not None
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise NotCapturable("SDPA over pages reads lengths on the host")
    shares = sharing and q.is_cpu and keys.shape == values.shape and scores.plain
    layout = Layout(keys.shape[1], scores.window, shares, q.dtype, q.device)
    bounds, lengths = (tuple(x.tolist()) for x in (varlen.cu_seqlens, pages.lengths))
    batches, families = plan(bounds, lengths, pages.table.cpu().numpy().tobytes(), layout)
    out = q.new_zeros(q.shape[0], q.shape[1], values.shape[-1])
    wide = torch.promote_types(q.dtype, torch.float32)
    log_sums = q.new_empty(q.shape[:2], dtype=wide) if families else None
    for batch in batches:
        k, v = (_gathered(x, batch) for x in (keys, values))
        queries = q.index_select(0, batch.rows).view(batch.count, -1, *q.shape[1:]).transpose(1, 2)
        if log_sums is None:
            mixed = _rectangle(queries, k, v, scores, batch.bias)
        else:
            mixed, sums = _with_log_sums(queries, k, v, scores.scale, batch.bias)
            log_sums.index_copy_(0, batch.rows, sums.transpose(1, 2).flatten(0, 1))
        out.index_copy_(0, batch.rows, mixed.transpose(1, 2).flatten(0, 1))
    for family in families:
        assert log_sums is not None
        _join(out, log_sums, q, keys, values, family, scores.scale)
    return out


def _gathered(cache: Tensor, batch: Batch) -> Tensor:
    """Pages [pages, size, H, D] as a batch [n, H, L, D]; what belongs to nobody is blanked.

    Masking it would not do: another request may have left a NaN there.
    """
    rows = cache.index_select(0, batch.pages).flatten(0, 1)
    if batch.stale is not None:
        rows.index_fill_(0, batch.stale, 0)
    return rows.view(batch.count, -1, *cache.shape[2:])[:, : batch.length].transpose(1, 2)


def _join(
    out: Tensor,
    log_sums: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    family: Family,
    scale: float,
) -> None:
    """Add what a family's queries find in its shared pages to what they found in their own."""
    k, v = (x.index_select(0, family.pages).flatten(0, 1).transpose(0, 1) for x in (keys, values))
    heads, dim = k.shape[0], q.shape[2]
    rows = q.index_select(0, family.rows).view(len(family.rows), heads, -1, dim)
    asked = rows.transpose(0, 1).reshape(1, heads, -1, dim)
    found, sums = _with_log_sums(asked, k[None], v[None], scale, None, causal=False)
    found = found.view(heads, len(rows), -1, dim).transpose(0, 1).reshape(len(rows), -1, dim)
    sums = sums.view(heads, len(rows), -1).transpose(0, 1).reshape(len(rows), -1)
    weight = torch.sigmoid(sums - log_sums.index_select(0, family.rows))[..., None]
    own = out.index_select(0, family.rows).to(weight.dtype)
    out.index_copy_(0, family.rows, own.lerp(found.to(own.dtype), weight).to(out.dtype))


def _with_log_sums(
    q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None, causal: bool = True
) -> tuple[Tensor, Tensor]:
    """Attend as `_rectangle`, on a CPU; and the log-sum-exp [N, H, L] of each query's scores."""
    group = q.shape[1] // k.shape[1]
    shape = q.shape[:3]
    if group > 1 and q.shape[2] == 1:
        q = q.reshape(q.shape[0], k.shape[1], group, q.shape[3])
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, is_causal=causal and bias is None, attn_mask=bias, scale=scale
    )
    return out.reshape(*shape, v.shape[3]), sums.reshape(shape)


def _rectangle(q: Tensor, k: Tensor, v: Tensor, scores: ScoreParams, bias: Tensor | None) -> Tensor:
    """Attend a batch [N, H, L, D]; without a bias, causally, with as many keys as queries."""
    if scores.softcap is not None or scores.sinks is not None:
        return _written_out(q, k, v, scores, bias)
    if bias is None and scores.window is not None and scores.window < q.shape[2]:
        bias = blind(visible(q.shape[2], k.shape[2], scores.window, q.device), q.dtype)
    group = q.shape[1] // k.shape[1]
    if group > 1 and q.shape[2] == 1:  # a decode: the group's heads are rows of one product
        rows = q.reshape(q.shape[0], k.shape[1], group, q.shape[3])
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=bias, scale=scores.scale)
        return out.reshape(*q.shape[:3], v.shape[3])
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=bias, is_causal=bias is None, scale=scores.scale, enable_gqa=group > 1
    )


def _written_out(
    q: Tensor, k: Tensor, v: Tensor, scores: ScoreParams, bias: Tensor | None
) -> Tensor:
    """Softcap and sinks, which the fused function does not know."""
    if bias is None:
        bias = blind(visible(q.shape[2], k.shape[2], scores.window, q.device), torch.float32)
    n, heads, queries, _ = q.shape
    rows = q.reshape(n, k.shape[1], -1, queries, q.shape[3])
    logits = (rows @ k[:, :, None].transpose(-1, -2)).float() * scores.scale
    if scores.softcap is not None:
        logits = torch.tanh(logits / scores.softcap) * scores.softcap
    logits = logits + (bias if bias.ndim == 2 else bias[:, :, None])
    if scores.sinks is not None:
        sink = scores.sinks.float().view(1, k.shape[1], -1, 1, 1).expand(n, -1, -1, queries, 1)
        logits = torch.cat([logits, sink], -1)
    weights = torch.softmax(logits, -1)[..., : k.shape[2]].to(v.dtype)
    return (weights @ v[:, :, None]).reshape(n, heads, queries, v.shape[3])
