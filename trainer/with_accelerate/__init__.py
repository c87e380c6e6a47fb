"""Accelerate: packs and evaluation by generation in training loops of your own."""

from .evaluation import AccelerateEval
from .loader import PackedAccelerateLoader

__all__ = [
    "AccelerateEval",
    "PackedAccelerateLoader",
]
