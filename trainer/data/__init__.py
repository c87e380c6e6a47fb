"""Loaders of packs for training and validation, and the saved position in the data."""

from .data_state import gathered_state, load_data_state, save_data_state
from .loader import EvaluationLoader, PackedLoader

__all__ = [
    "EvaluationLoader",
    "PackedLoader",
    "gathered_state",
    "load_data_state",
    "save_data_state",
]
