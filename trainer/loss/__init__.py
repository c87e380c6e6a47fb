"""The exact token-mean loss without materialized logits."""

from .attached_loss import attach_loss
from .cross_entropy import linear_cross_entropy

__all__ = [
    "attach_loss",
    "linear_cross_entropy",
]
