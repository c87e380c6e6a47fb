"""`labels` of documents with targets, one each or one per token; `loss_weights`, 0 without one.

    targets 3 | 0 | 2          labels [3, 0, 2]              one for each sequence of the batch
    targets [0, 1] | [1]       labels [[0, 1, 1]]            one for each token

Sequences of padding have a label that the loss ignores, with weight 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..packing import IGNORE_INDEX, Pack, is_per_token


def document_labels(
    packs: Sequence[Pack], widths: Sequence[int], num_sequences: int, shape: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    """Return `labels` and `loss_weights` of packs whose documents have targets.

    widths: tokens of each pack, with padding.
    shape: of the row of tokens.
    """
    targets: list[Any] = []
    for pack, width in zip(packs, widths, strict=True):
        targets += pack.targets or []
        targets += [None] * (len(pack.tokens) < width)  # an empty pack has no targets
    targets += [None] * (num_sequences - len(targets))
    are_per_token = {is_per_token(target) for target in targets if target is not None}
    if len(are_per_token) > 1:
        raise ValueError("some documents have one label, others one for each token: pass one kind")
    labels = _per_token(packs, widths).reshape(shape) if True in are_per_token else _stack(targets)
    is_counted = labels != IGNORE_INDEX
    if labels.dtype.kind == "f":
        is_counted = np.array([target is not None for target in targets])
    return {
        "labels": torch.from_numpy(labels),
        "loss_weights": torch.from_numpy(is_counted.astype(np.float32)),
    }


def _per_token(packs: Sequence[Pack], widths: Sequence[int]) -> np.ndarray:
    """int64 [T]: the labels of all tokens."""
    parts: list[np.ndarray] = []
    for pack, width in zip(packs, widths, strict=True):
        padding = np.full(width - len(pack.tokens), IGNORE_INDEX)
        parts += [*(pack.targets or []), padding]
    return np.concatenate(parts).astype(np.int64)


def _stack(targets: list[Any]) -> np.ndarray:
    """[N] or [N, classes]: the label of each sequence; int64 if all are classes, else float32.

    >>> _stack([3, None, 0]).tolist(), _stack([0.5, None]).tolist()
    ([3, -100, 0], [0.5, 0.0])
    """
    given = [target for target in targets if target is not None]
    if all(isinstance(target, int) for target in given):
        ids = [IGNORE_INDEX if target is None else target for target in targets]
        return np.array(ids, np.int64)
    shapes = {np.shape(target) for target in given}
    if len(shapes) > 1:
        raise ValueError(f"labels of the shapes {sorted(shapes)}: pass as many for each document")
    nothing = np.zeros(shapes.pop(), np.float32)
    return np.array([nothing if target is None else target for target in targets], np.float32)
