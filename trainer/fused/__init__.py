"""Fused kernels inside a model's own layers, verified against the stock forward."""

from .class_swap import FusedLayers
from .compile_layers import compile_layers
from .fuse_layers import fuse_layers

__all__ = [
    "FusedLayers",
    "compile_layers",
    "fuse_layers",
]
