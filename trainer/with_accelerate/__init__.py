"""Packs and evaluation in training loops written with Accelerate."""

from .evaluation import AccelerateEval
from .loader import AcceleratePacks

__all__ = [
    "AccelerateEval",
    "AcceleratePacks",
]
