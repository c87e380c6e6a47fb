"""Lightning: packs, loss, evaluation by generation and signals, as a data module and callbacks."""

from .data_module import PackedDataModule
from .evaluation import EvalCallback, ServeCallback
from .export import save_pretrained
from .packed_callback import PackedCallback
from .stopping import StopCallback

__all__ = [
    "EvalCallback",
    "PackedCallback",
    "PackedDataModule",
    "ServeCallback",
    "StopCallback",
    "save_pretrained",
]
