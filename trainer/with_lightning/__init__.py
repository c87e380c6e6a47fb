"""Lightning: packs, loss, evaluation by generation and signals, as a data module and callbacks."""

from .evaluation import EvalCallback
from .packs import PackedCallback, PackedDataModule
from .stopping import StopCallback

__all__ = [
    "EvalCallback",
    "PackedCallback",
    "PackedDataModule",
    "StopCallback",
]
