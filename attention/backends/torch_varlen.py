"""`torch.nn.attention.varlen`: packed training rows on CUDA without any other package."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..varlen import Varlen
from .call_spec import CallSpec, ScoreParams

try:
    from torch.nn.attention.varlen import varlen_attn

    _parameters = set(inspect.signature(varlen_attn).parameters)
except ImportError:
    varlen_attn, _parameters = None, set()


def unsupported_reason(spec: CallSpec) -> str | None:
    if spec.device != "cuda":
        return "it needs CUDA"
    if varlen_attn is None:
        return f"torch {torch.__version__} has no varlen attention"
    if spec.softcap or spec.sinks:
        return "it has no softcap and no sinks"
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
    assert varlen_attn is not None
    padding = q.shape[-1] - v.shape[-1]
    kwargs: dict[str, Any] = {"scale": score_params.scale}
    if "window_size" in _parameters:
        kwargs["window_size"] = (-1 if score_params.window is None else score_params.window - 1, 0)
    else:
        kwargs["is_causal"] = True
    if "enable_gqa" in _parameters:
        kwargs["enable_gqa"] = q.shape[1] != k.shape[1]
    out = varlen_attn(
        q,
        k,
        F.pad(v, (0, padding)) if padding else v,
        varlen.cu_seqlens,
        varlen.cu_seqlens,
        varlen.max_length,
        varlen.max_length,
        **kwargs,
    )
    assert isinstance(out, Tensor)
    return out[..., : v.shape[-1]] if padding else out
