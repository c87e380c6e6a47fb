"""Packs and evaluation in training loops written with Accelerate."""

from .evaluation import AccelerateEval
from .loader import PackedAccelerateLoader

__all__ = [
    "AccelerateEval",
    "PackedAccelerateLoader",
]
