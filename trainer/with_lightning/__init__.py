"""Packs, loss and evaluation in Lightning."""

from .evaluation import EvalCallback
from .packs import PackedCallback, PackedDataModule
from .stopping import StopCallback

__all__ = [
    "EvalCallback",
    "PackedCallback",
    "PackedDataModule",
    "StopCallback",
]
