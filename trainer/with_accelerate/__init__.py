"""Accelerate: packs and evaluation by generation in your own training loop."""

from .checkpoint import load_checkpoint, save_checkpoint
from .evaluation import AccelerateEval, AccelerateServe
from .loader import PackedAccelerateLoader

__all__ = [
    "AccelerateEval",
    "AccelerateServe",
    "PackedAccelerateLoader",
    "load_checkpoint",
    "save_checkpoint",
]
