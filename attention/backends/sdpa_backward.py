"""Explicit backward of `sdpa` for a packed row, for the custom operator under torch.compile.

With S the scores, P = softmax(S) and O = P V:

    dV = Pᵀ dO      dP = dO Vᵀ      dS = P (dP - Σ P dP)      dQ = scale dS K      dK = scale dSᵀ Q

A softcap c tanh(S / c) multiplies dS by 1 - tanh²; a sink is a column of S without a value.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ..reference import causal_mask
from ..varlen import Varlen
from .call_spec import ScoreParams


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    varlen: Varlen,
    score_params: ScoreParams,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and the sinks (empty without sinks)."""
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    sinks = score_params.sinks
    dsinks = q.new_zeros(0) if sinks is None else torch.zeros_like(sinks)
    for start, end in pairwise(varlen.cu_seqlens.tolist()):
        if start == end:
            continue
        rows = slice(start, end)
        dq[rows], dk[rows], dv[rows], dsink = _one_sequence(
            grad[rows], q[rows], k[rows], v[rows], score_params
        )
        if sinks is not None:
            dsinks += dsink.to(dsinks.dtype)
    return dq, dk, dv, dsinks


def _one_sequence(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, score_params: ScoreParams
) -> list[Tensor]:
    """Gradients of one sequence; heads are split into (kv head, group), products are in fp32."""
    length, heads, _ = q.shape
    grouped = (length, k.shape[1], heads // k.shape[1], -1)
    q, grad = q.float().view(grouped), grad.float().view(grouped)
    k, v = k.float(), v.float()
    s = torch.einsum("qhgd,khd->hgqk", q, k) * score_params.scale
    slope = torch.ones_like(s)
    if score_params.softcap is not None:
        tanh = torch.tanh(s / score_params.softcap)
        s, slope = tanh * score_params.softcap, 1 - tanh.square()
    window, causal = score_params.window, score_params.causal
    s = s.masked_fill(~causal_mask(length, length, window, s.device, causal), -torch.inf)
    if score_params.sinks is not None:
        sinks = score_params.sinks.float().view(*s.shape[:2], 1, 1).expand(*s.shape[:3], 1)
        s = torch.cat([s, sinks], -1)
    p = torch.softmax(s, -1)
    p_keys = p[..., :length]
    dp = torch.einsum("qhgd,khd->hgqk", grad, v)
    delta = (p_keys * dp).sum(-1, keepdim=True)
    ds = p_keys * (dp - delta) * slope * score_params.scale
    return [
        torch.einsum("hgqk,khd->qhgd", ds, k).flatten(1, 2),
        torch.einsum("hgqk,qhgd->khd", ds, q),
        torch.einsum("hgqk,qhgd->khd", p_keys, grad),
        -(p[..., length:] * delta).sum((2, 3)).flatten(),
    ]
