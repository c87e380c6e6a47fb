"""`attend_by_backward`: differentiable attention from a backend's `forward` and `backward`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..varlen import Varlen
from .call_spec import ScoreParams


def attend_by_backward(
    backend: Any, q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, score_params: ScoreParams
) -> Tensor:
    """Attend by the `forward` and the `backward` of a backend, with or without sinks."""
    return _Attend.apply(q, k, v, score_params.sinks, backend, varlen, score_params)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, backend, varlen, score_params):
        out, lse = backend.forward(q, k, v, varlen, score_params)
        ctx.save_for_backward(q, k, v, sinks, out, lse, varlen.cu_seqlens)
        ctx.call = backend, varlen.max_length, score_params
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, sinks, out, lse, cu_seqlens = ctx.saved_tensors
        backend, max_length, params = ctx.call
        params = replace(params, sinks=sinks)
        varlen = Varlen(cu_seqlens, max_length)
        grads = backend.backward(grad.contiguous(), q, k, v, out, lse, varlen, params)
        dsinks = grads[3] if sinks is not None else None
        return *grads[:3], dsinks, None, None, None
