"""The exact token-mean loss, computed without materializing logits."""

from .attached_loss import AttachedLoss, attach_loss
from .cross_entropy import linear_cross_entropy
from .preference import preference_log_probs

__all__ = [
    "AttachedLoss",
    "attach_loss",
    "linear_cross_entropy",
    "preference_log_probs",
]
