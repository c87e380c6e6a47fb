"""Checkpoints, LoRA adapters and tokenizers by name: paths, loading, errors in one line."""

from .checkpoint import checkpoint_path, has_weights, is_adapter, resolve_path, short_error
from .loading import (
    choose_device,
    hide_progress_bars,
    load_model,
    load_pretrained,
    load_tokenizer,
    load_weights,
)

__all__ = [
    "checkpoint_path",
    "choose_device",
    "has_weights",
    "hide_progress_bars",
    "is_adapter",
    "load_model",
    "load_pretrained",
    "load_tokenizer",
    "load_weights",
    "resolve_path",
    "short_error",
]
