"""The backward of a packed row, written out, for where autograd cannot look: inside one operation.

With S the scores, P = softmax(S) and O = P V:

    dV = Pᵀ dO      dP = dO Vᵀ      dS = P (dP - Σ P dP)      dQ = scale dS K      dK = scale dSᵀ Q

A softcap c tanh(S / c) multiplies dS by 1 - tanh²; a sink is a column of S without a value.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ..reference import visible
from ..varlen import Varlen
from .call_spec import ScoreParams


def packed_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, scores: ScoreParams
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the sinks (empty without sinks)."""
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    sinks = scores.sinks
    dsinks = q.new_zeros(0) if sinks is None else torch.zeros_like(sinks)
    for start, end in pairwise(varlen.cu_seqlens.tolist()):
        if start == end:
            continue
        part = slice(start, end)
        parts = _one(grad[part], q[part], k[part], v[part], scores)
        for whole, piece in zip((dq, dk, dv), parts, strict=False):
            whole[part] = piece
        if sinks is not None:
            dsinks += parts[3].to(dsinks.dtype)
    return dq, dk, dv, dsinks


def _one(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, scores: ScoreParams) -> list[Tensor]:
    """One sequence; heads stand as (kv head, group), products are in fp32."""
    length, heads, _ = q.shape
    groups = (length, k.shape[1], heads // k.shape[1], -1)
    q, grad = q.float().view(groups), grad.float().view(groups)
    k, v = k.float(), v.float()
    s = torch.einsum("qhgd,khd->hgqk", q, k) * scores.scale
    slope = torch.ones_like(s)
    if scores.softcap is not None:
        bent = torch.tanh(s / scores.softcap)
        s, slope = bent * scores.softcap, 1 - bent.square()
    s = s.masked_fill(~visible(length, length, scores.window, s.device), -torch.inf)
    if scores.sinks is not None:
        sink = scores.sinks.float().view(*s.shape[:2], 1, 1).expand(*s.shape[:3], 1)
        s = torch.cat([s, sink], -1)
    p = torch.softmax(s, -1)
    p_keys = p[..., :length]
    dp = torch.einsum("qhgd,khd->hgqk", grad, v)
    delta = (p_keys * dp).sum(-1, keepdim=True)
    ds = p_keys * (dp - delta) * slope * scores.scale
    return [
        torch.einsum("hgqk,khd->qhgd", ds, k).flatten(1, 2),
        torch.einsum("hgqk,qhgd->khd", ds, q),
        torch.einsum("hgqk,qhgd->khd", p_keys, grad),
        -(p[..., length:] * delta).sum((2, 3)).flatten(),
    ]
