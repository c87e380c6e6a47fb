"""PyTorch SDPA, on every device: packed sequences one by one, pages in batches.

Packed rows are split, attended one sequence at a time and concatenated. Over pages, `sdpa_batching`
decides which sequences form a batch, and which pages are read once for several of them; the
attention to shared pages and to a sequence's own pages is then merged by log-sum-exp:

    out = (e^a · shared + e^b · own) / (e^a + e^b)        a, b: log-sum-exp of either's scores
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ..reference import causal_mask
from ..varlen import Varlen
from .call_spec import CallSpec, NotCapturable, ScoreParams
from .quantized_pages import dequantize_pages
from .sdpa_backward import backward  # noqa: F401 (a function of every backend)
from .sdpa_batching import Batch, PlanKey, SharedPrefix, additive_mask, plan

_share_prefixes: ContextVar[bool] = ContextVar("nopad_share_prefixes", default=True)


@contextmanager
def without_prefix_sharing() -> Iterator[None]:
    """Inside, read shared pages once per sequence: results do not depend on the other sequences."""
    token = _share_prefixes.set(False)
    try:
        yield
    finally:
        _share_prefixes.reset(token)


def limit_reason(spec: CallSpec) -> str | None:
    return None


def packed(q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, score_params: ScoreParams) -> Tensor:
    """Attend inside each sequence of a packed row."""
    cu_seqlens = varlen.cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(cu_seqlens) if end > start]
    outputs = []
    # split, not slices: its backward concatenates once, a slice's backward fills T zeros each
    for q_i, k_i, v_i in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        batch = [x.transpose(0, 1)[None] for x in (q_i, k_i, v_i)]
        output = _sdpa(*batch, score_params=score_params, bias=None)
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs) if outputs else q.new_zeros(0, q.shape[1], v.shape[-1])


def forward(
    q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, score_params: ScoreParams
) -> tuple[Tensor, Tensor]:
    """Attend like `packed`, without autograd; nothing but the inputs is kept for the backward."""
    unused = q.new_empty(q.shape[:2], dtype=torch.float32)
    return packed(q, k, v, varlen, score_params), unused


def paged(
    q: Tensor, keys: Tensor, values: Tensor, varlen: Varlen, scores: ScoreParams, *scales: Tensor
) -> Tensor:
    """Attend each sequence to the keys in its pages."""
    pages = varlen.pages
    assert pages is not None
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise NotCapturable("SDPA over pages reads lengths on the host")
    if scales:
        return paged(q, *dequantize_pages(q.dtype, keys, values, varlen, *scales), scores)
    same_dims = keys.shape == values.shape
    share = _share_prefixes.get() and q.is_cpu and same_dims and scores.scale_only
    key = PlanKey(keys.shape[1], scores.window, share, q.dtype, q.device)
    cu_seqlens, lengths = (tuple(x.tolist()) for x in (varlen.cu_seqlens, pages.lengths))
    batches, prefixes = plan(cu_seqlens, lengths, pages.table.cpu().numpy().tobytes(), key)
    out = q.new_zeros(q.shape[0], q.shape[1], values.shape[-1])
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    lse = q.new_empty(q.shape[:2], dtype=lse_dtype) if prefixes else None
    for batch in batches:
        k, v = (_gather_pages(x, batch) for x in (keys, values))
        queries = q.index_select(0, batch.rows).view(batch.count, -1, *q.shape[1:]).transpose(1, 2)
        if lse is None:
            output = _sdpa(queries, k, v, scores, batch.bias)
        else:
            output, batch_lse = _sdpa_with_lse(queries, k, v, scores.scale, batch.bias)
            lse.index_copy_(0, batch.rows, batch_lse.transpose(1, 2).flatten(0, 1))
        out.index_copy_(0, batch.rows, output.transpose(1, 2).flatten(0, 1))
    for prefix in prefixes:
        assert lse is not None
        _merge_prefix(out, lse, q, [keys, values], prefix, scores.scale)
    return out


def _gather_pages(cache: Tensor, batch: Batch) -> Tensor:
    """Pages [pages, size, H, D] as a batch [n, H, L, D], with unused KV slots set to zero.

    Masking them is not enough: another request may have left a NaN there.
    """
    rows = cache.index_select(0, batch.pages).flatten(0, 1)
    if batch.unused is not None:
        rows.index_fill_(0, batch.unused, 0)
    return rows.view(batch.count, -1, *cache.shape[2:])[:, : batch.length].transpose(1, 2)


def _merge_prefix(
    out: Tensor, lse: Tensor, q: Tensor, kv: list[Tensor], prefix: SharedPrefix, scale: float
) -> None:
    """Merge the attention to a shared prefix into `out`, which has the attention to own pages."""
    k, v = (x.index_select(0, prefix.pages).flatten(0, 1).transpose(0, 1) for x in kv)
    kv_heads, dim = k.shape[0], q.shape[2]
    rows = q.index_select(0, prefix.rows).view(len(prefix.rows), kv_heads, -1, dim)
    queries = rows.transpose(0, 1).reshape(1, kv_heads, -1, dim)
    shared, shared_lse = _sdpa_with_lse(queries, k[None], v[None], scale, None, causal=False)
    shared = shared.view(kv_heads, len(rows), -1, dim).transpose(0, 1).reshape(len(rows), -1, dim)
    shared_lse = shared_lse.view(kv_heads, len(rows), -1).transpose(0, 1).reshape(len(rows), -1)
    weight = torch.sigmoid(shared_lse - lse.index_select(0, prefix.rows))[..., None]
    own = out.index_select(0, prefix.rows).to(weight.dtype)
    out.index_copy_(0, prefix.rows, own.lerp(shared.to(own.dtype), weight).to(out.dtype))


def _sdpa_with_lse(
    q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None, causal: bool = True
) -> tuple[Tensor, Tensor]:
    """Attend like `_sdpa`, on a CPU; return the output and the log-sum-exp [N, H, L] as well."""
    group = q.shape[1] // k.shape[1]
    shape = q.shape[:3]
    if group > 1 and q.shape[2] == 1:
        q = q.reshape(q.shape[0], k.shape[1], group, q.shape[3])
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, is_causal=causal and bias is None, attn_mask=bias, scale=scale
    )
    return out.reshape(*shape, v.shape[3]), lse.reshape(shape)


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, score_params: ScoreParams, bias: Tensor | None
) -> Tensor:
    """Attend a batch [N, H, L, D]; without a bias, with as many keys as queries."""
    if score_params.softcap is not None or score_params.sinks is not None:
        return _explicit_softmax(q, k, v, score_params, bias)
    scale, window = score_params.scale, score_params.window
    if bias is None and window is not None and window < q.shape[2]:
        mask = causal_mask(q.shape[2], k.shape[2], window, q.device, score_params.causal)
        bias = additive_mask(mask, q.dtype)
    group = q.shape[1] // k.shape[1]
    if group > 1 and q.shape[2] == 1:  # a decode: the heads of a group are rows of one product
        rows = q.reshape(q.shape[0], k.shape[1], group, q.shape[3])
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=bias, scale=scale)
        return out.reshape(*q.shape[:3], v.shape[3])
    causal = bias is None and score_params.causal
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=bias, is_causal=causal, scale=scale, enable_gqa=group > 1
    )


def _explicit_softmax(
    q: Tensor, k: Tensor, v: Tensor, score_params: ScoreParams, bias: Tensor | None
) -> Tensor:
    """Softcap and sinks, which the fused function does not have."""
    if bias is None:
        window, causal = score_params.window, score_params.causal
        mask = causal_mask(q.shape[2], k.shape[2], window, q.device, causal)
        bias = additive_mask(mask, torch.float32)
    n, heads, queries, _ = q.shape
    rows = q.reshape(n, k.shape[1], -1, queries, q.shape[3])
    logits = (rows @ k[:, :, None].transpose(-1, -2)).float() * score_params.scale
    if score_params.softcap is not None:
        logits = torch.tanh(logits / score_params.softcap) * score_params.softcap
    logits = logits + (bias if bias.ndim == 2 else bias[:, :, None])
    if score_params.sinks is not None:
        sinks = score_params.sinks.float().view(1, k.shape[1], -1, 1, 1)
        logits = torch.cat([logits, sinks.expand(n, -1, -1, queries, 1)], -1)
    weights = torch.softmax(logits, -1)[..., : k.shape[2]].to(v.dtype)
    return (weights @ v[:, :, None]).reshape(n, heads, queries, v.shape[3])
