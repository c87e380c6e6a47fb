"""Fused kernels inside a model's own layers, verified against the original forward."""

from .adamw import ClippedAdamW
from .compile_layers import compile_layers
from .fuse_layers import fuse_layers

__all__ = [
    "ClippedAdamW",
    "compile_layers",
    "fuse_layers",
]
