"""Backend `triton_packed`: our kernels for packed rows, with soft caps; runs only if forced."""

# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import os
import sys

import torch
from torch import Tensor

from ..varlen import Varlen
from .call_spec import CallSpec, ScoreParams
from .forward_backward import attend_by_backward
from .sinks import add_sinks, sinks_gradient

try:
    from ...kernels import packed_attention, packed_attention_backward

    _has_triton = True
except ImportError:  # `limit_reason` reports it
    _has_triton = False


def limit_reason(spec: CallSpec) -> str | None:
    if not _has_triton:
        return "triton is not installed"
    if spec.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "on a CPU it needs TRITON_INTERPRET=1"
    if spec.dtype not in (torch.float16, torch.bfloat16):
        return f"it has no fast {spec.dtype} products"
    if not spec.causal:
        return "it is causal"
    if spec.key_dim != spec.value_dim or spec.key_dim > 256:
        return f"head dims {spec.key_dim} and {spec.value_dim} differ or are over 256"
    return None


def packed(q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, score_params: ScoreParams) -> Tensor:
    """Attend inside each sequence of a packed row."""
    return attend_by_backward(sys.modules[__name__], q, k, v, varlen, score_params)


def forward(
    q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, score_params: ScoreParams
) -> tuple[Tensor, Tensor]:
    """Attend like `packed`, without autograd; return the log-sum-exp [H, T] as well."""
    bounds = varlen.cu_seqlens, varlen.max_length
    options = score_params.scale, score_params.window, score_params.softcap
    return add_sinks(*packed_attention(q, k, v, *bounds, *options), score_params.sinks)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    varlen: Varlen,
    score_params: ScoreParams,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v, and of the sinks if there are any."""
    lse = lse.view(q.shape[1], -1)
    bounds = varlen.cu_seqlens, varlen.max_length
    options = score_params.scale, score_params.window, score_params.softcap
    grads = packed_attention_backward(grad, q, k, v, out, lse, *bounds, *options)
    if score_params.sinks is None:
        return grads
    return *grads, sinks_gradient(grad, out, lse, score_params.sinks)
