"""flash-attn as a library: what its generations share.

The installed package serves, else its prebuilt build through `kernels`.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch

from .call_spec import CallSpec, ScoreParams


@cache
def find(package: str, build: str) -> tuple[Any, str | None]:
    """The library, or why there is none."""
    try:
        return importlib.import_module(package), None
    except Exception as missing:  # a build for another torch raises anything
        reason = f"{package} is not installed ({type(missing).__name__}: {missing})"
    try:
        from kernels import get_kernel

        return get_kernel(build), None
    except Exception:
        return None, reason


def why_not(ask: CallSpec) -> str | None:
    if ask.device != "cuda":
        return "it needs CUDA"
    if ask.sinks:
        return "it knows no sinks"
    if ask.dtype not in (torch.float16, torch.bfloat16):
        return f"it has no {ask.dtype} kernels"
    if ask.key_dim > 256 or ask.key_dim % 8:
        return f"head dim {ask.key_dim} is over 256 or no multiple of 8"
    return None


def rule(scores: ScoreParams) -> dict[str, Any]:
    """How scores are made, in the library's words."""
    return {
        "softmax_scale": scores.scale,
        "causal": True,
        "window_size": (-1, -1) if scores.window is None else (scores.window - 1, 0),
        "softcap": scores.softcap or 0.0,
    }
