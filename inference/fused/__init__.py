"""Fused kernels for generation, verified against the model's own layers."""

from .fused_ops import FusedOp, FusedOps, apply_ops, verified_ops
from .qkv_weights import QKVWeights, stacked_bytes

__all__ = [
    "FusedOp",
    "FusedOps",
    "QKVWeights",
    "apply_ops",
    "stacked_bytes",
    "verified_ops",
]
