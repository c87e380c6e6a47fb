"""Plugins that put packs, exact losses and evaluations into the trainers people use.

The trainers' own front ends are imported by file, `nopad.trainer.with_hf` and its like, since each
needs its library. The names here need torch only, which is loaded when one of them is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .data.loader import EvaluationLoader, PackedLoader
    from .evaluation.generation_eval import Example, GenerationEval
    from .fused import ClippedAdamW, compile_layers
    from .fused.fuse_layers import fuse_layers
    from .loss.attached_loss import attach_loss
    from .loss.cross_entropy import linear_cross_entropy

__all__ = [
    "ClippedAdamW",
    "EvaluationLoader",
    "Example",
    "GenerationEval",
    "PackedLoader",
    "attach_loss",
    "compile_layers",
    "fuse_layers",
    "linear_cross_entropy",
]

FILES = {
    "ClippedAdamW": "fused",
    "EvaluationLoader": "data",
    "Example": "evaluation",
    "GenerationEval": "evaluation",
    "PackedLoader": "data",
    "attach_loss": "loss",
    "compile_layers": "fused",
    "fuse_layers": "fused",
    "linear_cross_entropy": "loss",
}
"""Where each name is at home."""


def __getattr__(name: str) -> Any:
    if name in FILES:
        return getattr(import_module(f".{FILES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
