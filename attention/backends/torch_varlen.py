"""`torch.nn.attention.varlen`: packed training rows on CUDA with nothing else installed."""

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

    _names = set(inspect.signature(varlen_attn).parameters)
except ImportError:
    varlen_attn, _names = None, set()


def why_not(ask: CallSpec) -> str | None:
    if ask.device != "cuda":
        return "it needs CUDA"
    if varlen_attn is None:
        return f"torch {torch.__version__} has no varlen attention"
    if ask.softcap or ask.sinks:
        return "it knows no softcap and no sinks"
    if ask.window and "window_size" not in _names:
        return f"torch {torch.__version__} knows no window here"
    if ask.dtype not in (torch.float16, torch.bfloat16):
        return f"it has no {ask.dtype} kernels"
    if ask.grad and torch.are_deterministic_algorithms_enabled():
        return "its backward is not deterministic"
    if ask.value_dim > ask.key_dim:
        return f"value dim {ask.value_dim} beside key dim {ask.key_dim}"
    if ask.key_dim > 256 or ask.key_dim % 8:
        return f"head dim {ask.key_dim} is over 256 or no multiple of 8"
    return None


def packed(q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, scores: ScoreParams) -> Tensor:
    """Attend inside each sequence of a packed row."""
    assert varlen_attn is not None
    wide = q.shape[-1] - v.shape[-1]
    rule: dict[str, Any] = {"scale": scores.scale}
    if "window_size" in _names:
        rule["window_size"] = (-1 if scores.window is None else scores.window - 1, 0)
    else:
        rule["is_causal"] = True
    if "enable_gqa" in _names:
        rule["enable_gqa"] = q.shape[1] != k.shape[1]
    longest = varlen.max_length
    out = varlen_attn(
        q,
        k,
        F.pad(v, (0, wide)) if wide else v,
        varlen.cu_seqlens,
        varlen.cu_seqlens,
        longest,
        longest,
        **rule,
    )
    assert isinstance(out, Tensor)
    return out[..., : v.shape[-1]] if wide else out
