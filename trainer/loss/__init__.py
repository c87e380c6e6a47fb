"""The exact token-mean loss without materialized logits; preference log-probs; embeddings."""

from .attached_loss import AttachedLoss, attach_loss
from .cross_entropy import linear_cross_entropy
from .embeddings import document_embeddings, pool_documents
from .preference_log_probs import preference_log_probs

__all__ = [
    "AttachedLoss",
    "attach_loss",
    "document_embeddings",
    "linear_cross_entropy",
    "pool_documents",
    "preference_log_probs",
]
