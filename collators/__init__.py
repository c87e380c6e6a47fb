"""Samples or packs to the batch that a training step eats."""

from .packed import PackedCollator
from .padded import PaddedCollator

__all__ = ["PackedCollator", "PaddedCollator"]
