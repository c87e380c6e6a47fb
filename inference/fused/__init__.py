"""Fused kernels for generation, verified against the model's own layers."""

from .fused_ops import FusedOp, FusedOps, apply_ops, verified_ops
from .stacked_weights import StackedWeights, stacked_bytes

__all__ = [
    "FusedOp",
    "FusedOps",
    "StackedWeights",
    "apply_ops",
    "stacked_bytes",
    "verified_ops",
]
