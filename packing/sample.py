"""A sample: one tokenized document and its labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

IGNORE_INDEX = -100
"""The label of a token that the loss ignores, as everywhere in the Hugging Face ecosystem."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One document. Labels are at the positions of their tokens; the model shifts them.

    >>> Sample(np.array([5, 6, 7])).labels.tolist()
    [-100, 6, 7]
    """

    tokens: np.ndarray
    """int64 [n], n >= 1."""
    labels: np.ndarray = None  # pyright: ignore[reportAssignmentType]
    """int64 [n], IGNORE_INDEX where the loss ignores a token; default: all tokens but the first."""
    source: int = 0
    """Index of the mixture's source that the sample comes from."""
    target: Any = None
    """The label of the document, or of each token, for other heads than an LM's (`targets.py`)."""
    images: Any = None
    """The images of the document (`images.py`), if it has any."""

    def __post_init__(self):
        tokens = np.asarray(self.tokens)
        labels = tokens if self.labels is None else np.asarray(self.labels)
        if tokens.ndim != 1 or not len(tokens):
            raise ValueError(f"a sample needs at least one token in one row, got {tokens.shape}")
        if labels.shape != tokens.shape:
            raise ValueError(f"{len(tokens)} tokens but {labels.size} labels: one label per token")
        if tokens.dtype.kind not in "iu" or labels.dtype.kind not in "iu":
            raise ValueError(f"ids must be integers, got {tokens.dtype} and {labels.dtype} labels")
        tokens, labels = np.ascontiguousarray(tokens, np.int64), labels.astype(np.int64)
        if self.labels is not None:
            check_labels(tokens, labels)
        labels[0] = IGNORE_INDEX  # no token of this sample precedes the first one
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "labels", labels)

    def __len__(self) -> int:
        return len(self.tokens)


def check_labels(tokens: np.ndarray, labels: np.ndarray) -> None:
    """Raise unless every label is its own token or ignored: only the model shifts labels.

    >>> check_labels(np.array([5, 6, 7]), np.array([6, 7, IGNORE_INDEX]))
    Traceback (most recent call last):
    ValueError: the label of token 0 is 6, the token is 5: pass labels unshifted, the model shifts
    """
    odd = (labels != tokens) & (labels != IGNORE_INDEX)
    if odd.any():
        first = int(np.argmax(odd))
        raise ValueError(
            f"the label of token {first} is {labels[first]}, the token is {tokens[first]}: "
            "pass labels unshifted, the model shifts"
        )
