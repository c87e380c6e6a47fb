"""Packs, loss and evaluation in the HF Trainer and trainers derived from it, TRL's among them."""

from .evaluation import EvalCallback
from .stopping import StopCallback
from .trainer import Packed, PackedTrainer

__all__ = [
    "EvalCallback",
    "Packed",
    "PackedTrainer",
    "StopCallback",
]
