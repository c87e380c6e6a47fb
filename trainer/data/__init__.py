"""Loaders of packs for training and validation, and the data position of a checkpoint."""

from .data_state import DataState, gather_data_state, load_data_state, save_data_state
from .loader import EvaluationLoader, PackedLoader, PackInfo

__all__ = [
    "DataState",
    "EvaluationLoader",
    "PackInfo",
    "PackedLoader",
    "gather_data_state",
    "load_data_state",
    "save_data_state",
]
