"""Statistics of the predictions of a batch, beside its loss: accuracy and entropy."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...packing import IGNORE_INDEX

CHUNK_ROWS = 1024
"""Tokens whose logits exist at a time."""


@torch.no_grad()
def token_statistics(
    hidden: Tensor, targets: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Return three sums over the labels: right predictions, entropies, labels.

    hidden: of each token [N, width]; without a weight, its logits.
    targets: shifted labels [N].
    """
    is_label, size = targets != IGNORE_INDEX, CHUNK_ROWS
    hidden, targets = hidden[is_label], targets[is_label]
    sums = torch.zeros(3, device=targets.device)
    for rows, labels in zip(hidden.split(size), targets.split(size), strict=True):
        logits = rows if weight is None else nn.functional.linear(rows, weight, bias)
        log_probs = logits.float().log_softmax(-1)
        right = (logits.argmax(-1) == labels).sum()
        entropy = -(log_probs.exp() * log_probs).sum()
        sums += torch.stack([right.float(), entropy, labels.new_tensor(len(labels)).float()])
    return sums
