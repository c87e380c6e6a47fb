"""Attention sinks for kernels without them: rescale outputs by log-sum-exp; gradient of sinks.

A sink s is one more column of the softmax, without a value. With l the log-sum-exp of the scores of
a query:

    l' = log(e^l + e^s)        out' = out e^(l - l')        ds = -Σ e^(s - l') (dO · out')

The gradients of q, k and v are those that the backward of the kernels returns for out' and l' in
place of out and l: it computes P from l', and Σ P dP as dO · out'.
"""

from __future__ import annotations

import torch
from torch import Tensor


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return out [T, H, D] and the log-sum-exp [H, T] with the sinks [H] in the softmax.

    >>> one_key, lse = torch.ones(1, 1, 1), torch.zeros(1, 1)
    >>> [x.exp().item() for x in add_sinks(one_key, lse, torch.zeros(1))[1:]]
    [2.0]
    """
    if sinks is None:
        return out, lse
    total = torch.logaddexp(lse, sinks.float()[:, None])
    share = torch.exp(lse - total).t()
    return (out * share[..., None]).to(out.dtype), total


def sinks_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks; out, lse [H, T]: what `add_sinks` returned."""
    weight = torch.exp(sinks.float()[:, None] - lse)
    return -(weight * (grad.float() * out.float()).sum(-1).t()).sum(1).to(sinks.dtype)
