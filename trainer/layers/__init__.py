"""Decoder layers that train faster than the model's own: compiled, with experts grouped."""

from .class_swap import SwappedLayers
from .compile_layers import compile_layers
from .prepare_layers import PreparedLayers, prepare_layers, sharding_obstacle, trained_layers

__all__ = [
    "PreparedLayers",
    "SwappedLayers",
    "compile_layers",
    "prepare_layers",
    "sharding_obstacle",
    "trained_layers",
]
