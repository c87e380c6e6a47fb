"""Samples or packs to the batch that a training step eats."""

from .packed import PackedCollator
from .padded import PaddedCollator
from .preference import PreferenceCollator

__all__ = [
    "PackedCollator",
    "PaddedCollator",
    "PreferenceCollator",
]
