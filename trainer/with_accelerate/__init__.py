"""Accelerate: packs and evaluation by generation in your own training loop."""

from .checkpoint import load_checkpoint, save_checkpoint
from .evaluation import AccelerateEval
from .loader import PackedAccelerateLoader

__all__ = [
    "AccelerateEval",
    "PackedAccelerateLoader",
    "load_checkpoint",
    "save_checkpoint",
]
