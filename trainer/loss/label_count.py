"""Label counts of a batch: the asynchronous one is read without a device sync.

    forward starts ─▶ count on the device ─▶ copy to the host ─ ─ ─ ─ ┐
         └─▶ layers ─▶ ... ─▶ layers ─▶ loss: the count has arrived ◀─┘

The host runs ahead of the device. If the count were requested at the loss, the device would idle
until the answer is back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...packing import IGNORE_INDEX
from ...runtime import HostCopy


def count_labels(targets: Tensor) -> HostCopy | None:
    """Start counting; None while compiling or capturing, where no number can be read back.

    >>> int(count_labels(torch.tensor([[5, IGNORE_INDEX, 7]])).read())
    2
    """
    if torch.compiler.is_compiling():
        return None
    if targets.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    return HostCopy((targets != IGNORE_INDEX).sum())


def sum_weights(targets: Tensor, weights: Tensor | None) -> Tensor:
    """Return the sum of the weights of shifted labels; without weights, the number of labels."""
    return (targets != IGNORE_INDEX).sum() if weights is None else weights.sum()


def loss_weight(batch: dict[str, Any]) -> float:
    """Return the sum of the loss weights of a batch; its number of labels, if it has none.

    >>> loss_weight({"labels": torch.tensor([[IGNORE_INDEX, 5, IGNORE_INDEX, 7]])})
    2.0
    """
    weights = batch.get("loss_weights")
    if weights is None:
        weights = batch["labels"][..., 1:] != IGNORE_INDEX  # the first label has no prediction
    return float(weights.sum())
