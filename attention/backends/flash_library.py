"""flash-attn as a library: the installed package, else its prebuilt build through `kernels`."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from .ask import Scores


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


def rule(scores: Scores) -> dict[str, Any]:
    """How scores are made, in the library's words."""
    return {
        "softmax_scale": scores.scale,
        "causal": True,
        "window_size": (-1, -1) if scores.window is None else (scores.window - 1, 0),
        "softcap": scores.softcap or 0.0,
    }
