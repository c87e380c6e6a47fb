"""HF Trainer and trainers derived from it, TRL's among them: packs, loss, evaluation, signals."""

from .evaluation import EvalCallback
from .stopping import StopCallback
from .trainer import PackedTrainer, PackedTrainerMixin

__all__ = [
    "EvalCallback",
    "PackedTrainer",
    "PackedTrainerMixin",
    "StopCallback",
]
