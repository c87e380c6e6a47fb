"""Collators: samples or packs to the batch of a training step.

Importing this registers attn_implementation="nopad" with Transformers, so that a model can be
loaded with it before anything else of nopad is imported.
"""

from ..attention import register  # noqa: F401  importing it registers the name "nopad"
from .masked import MaskedCollator
from .media_inputs import NESTED
from .packed import PackedCollator
from .padded import PaddedCollator
from .preference import PreferenceCollator, sequence_log_probs

__all__ = [
    "NESTED",
    "MaskedCollator",
    "PackedCollator",
    "PaddedCollator",
    "PreferenceCollator",
    "sequence_log_probs",
]
