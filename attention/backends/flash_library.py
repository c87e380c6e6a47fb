"""flash-attn as a library: what flash-attn 2 and 3 share.

The installed package is used, otherwise its prebuilt build through `kernels`.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from ..score_params import ScoreParams
from .call_spec import CallSpec

_found: dict[str, tuple[Any, str | None]] = {}
"""Results of `find`. A dict, not `functools.cache`: torch.compile traces a lookup, and would trace
through the cache into the import."""


def find(package: str, build: str) -> tuple[Any, str | None]:
    """Return the library, or None and why there is none; loaded once per process."""
    if package not in _found:
        _found[package] = _load(package, build)
    return _found[package]


def _load(package: str, build: str) -> tuple[Any, str | None]:
    try:
        return importlib.import_module(package), None
    except Exception as error:  # a build for another torch may raise anything
        reason = f"{package} is not installed ({type(error).__name__}: {error})"
    try:
        from kernels import get_kernel

        return get_kernel(build), None
    except Exception:
        return None, reason


def declared_limit(spec: CallSpec) -> str | None:
    """Return the limit of both generations that rules a call out; None if there is none."""
    if spec.device != "cuda":
        return "it needs CUDA"
    if spec.sinks:
        return "it has no sinks"
    if spec.dtype not in (torch.float16, torch.bfloat16):
        return f"it has no {spec.dtype} kernels"
    if spec.key_dim > 256 or spec.key_dim % 8:
        return f"head dim {spec.key_dim} is over 256 or not a multiple of 8"
    return None


def score_kwargs(score_params: ScoreParams) -> dict[str, Any]:
    """Return the library's keyword arguments for these score parameters."""
    window = score_params.window
    return {
        "softmax_scale": score_params.scale,
        "causal": True,
        "window_size": (-1, -1) if window is None else (window - 1, 0),
        "softcap": score_params.softcap or 0.0,
    }
