"""`torch.nn.attention.varlen`: packed training rows on CUDA without any other package."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor

from ..varlen import Varlen
from .backend import padded_to
from .call_spec import CallSpec, ScoreParams
from .forward_backward import attend_by_backward
from .sinks import add_sinks, sinks_gradient

try:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    _parameters = set(inspect.signature(varlen_attn).parameters)
except ImportError:
    varlen_attn, AuxRequest, _parameters = None, None, set()


def limit_reason(spec: CallSpec) -> str | None:
    if spec.device != "cuda":
        return "it needs CUDA"
    if varlen_attn is None:
        return f"torch {torch.__version__} has no varlen attention"
    if spec.softcap:
        return "it has no softcap"
    if spec.window and "window_size" not in _parameters:
        return f"varlen attention of torch {torch.__version__} has no window"
    if spec.dtype not in (torch.float16, torch.bfloat16):
        return f"it has no {spec.dtype} kernels"
    if spec.grad and torch.are_deterministic_algorithms_enabled():
        return "its backward is not deterministic"
    if spec.value_dim > spec.key_dim:
        return f"value dim {spec.value_dim} is larger than key dim {spec.key_dim}"
    if spec.key_dim > 256 or spec.key_dim % 8:
        return f"head dim {spec.key_dim} is over 256 or not a multiple of 8"
    return None


def packed(q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, score_params: ScoreParams) -> Tensor:
    """Attend inside each sequence of a packed row."""
    if score_params.sinks is not None:
        return attend_by_backward(sys.modules[__name__], q, k, v, varlen, score_params)
    out = _attend(q, k, v, varlen, score_params)
    assert isinstance(out, Tensor)
    return out[..., : v.shape[-1]]


def forward(
    q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, score_params: ScoreParams
) -> tuple[Tensor, Tensor]:
    """Attend like `packed`, without autograd; return the log-sum-exp [H, T] as well."""
    assert AuxRequest is not None
    out, lse = _attend(q, k, v, varlen, score_params, return_aux=AuxRequest(lse=True))
    return add_sinks(out[..., : v.shape[-1]], lse, score_params.sinks)


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
    grad_, v_, out_ = (padded_to(x, q) for x in (grad, v, out))
    bounds = (varlen.cu_seqlens, varlen.cu_seqlens, varlen.max_length, varlen.max_length)
    window = _window(score_params)
    dq, dk, dv = torch.ops.torch_attn._varlen_attn_backward(
        *(grad_, q, k, v_, out_, lse, *bounds),
        window == (-1, 0),
        torch.zeros(2, dtype=torch.uint64, device=q.device),  # of dropout, which there is none
        scale=score_params.scale,
        window_size=list(window),
    )
    dv = dv[..., : v.shape[-1]].contiguous()
    if score_params.sinks is None:
        return dq, dk, dv
    return dq, dk, dv, sinks_gradient(grad, out, lse, score_params.sinks)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, score_params: ScoreParams, **kwargs: Any
) -> Any:
    assert varlen_attn is not None
    if "window_size" in _parameters:
        kwargs["window_size"] = _window(score_params)
    else:
        kwargs["is_causal"] = score_params.causal
    if "enable_gqa" in _parameters:
        kwargs["enable_gqa"] = q.shape[1] != k.shape[1]
    bounds = (varlen.cu_seqlens, varlen.cu_seqlens, varlen.max_length, varlen.max_length)
    return varlen_attn(q, k, padded_to(v, q), *bounds, scale=score_params.scale, **kwargs)


def _window(score_params: ScoreParams) -> tuple[int, int]:
    before = -1 if score_params.window is None else score_params.window - 1
    return before, 0 if score_params.causal else before
