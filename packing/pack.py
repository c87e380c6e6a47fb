"""A pack: samples concatenated into at most `budget` tokens, with their boundaries.

    tokens      [ a a a a | b b | c c c ]
    labels      [ . a a a | . b | . c c ]      . = -100, at the first token of every sequence
    cu_seqlens  [ 0         4     6       9 ]

A pack cannot be built without its boundaries, so downstream code never has to guess them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .sample import IGNORE_INDEX, Sample

MAX_BUDGET = 1 << 28
"""Largest budget: the memory of a planner grows with it, and boundaries are int32."""


@dataclass(slots=True, eq=False)
class Pack:
    """N sequences in one flat row; a sequence is a sample or one part of a split sample.

    Treat a pack as immutable. It is not declared frozen only because that costs 2 µs per pack, a
    third of the time it takes to build one.

    Args:
        tokens: int64 [T].
        explicit_labels: int64 [T]; None if all tokens but the first of each sequence are labels.
        cu_seqlens: int32 [N+1], from 0 to T; N = 0 in packs that give all ranks equally many.
        budget: tokens that the pack may hold.
        samples: int64 [N]: the number of each sequence's sample in its source, as read.
        sources: int16 [N]: index of the mixture's source that each sequence comes from.
        first_positions: int64 [N]: of each sequence; 0 unless positions of parts continue.
        index: index of this pack in the run's global sequence, -1 outside a run.
        cursor: what a resume needs besides the index to continue after this pack.
        parent_label_counts: int64 [N]: for a part of a split sample, the label count of the full
            sample; for a full sample, 0. None if no sample was split.
        targets: the target of each sequence (`targets.py`); None if samples have none.
        images: the images of each sequence (`images.py`), or None for those without.

    >>> pack = Pack.of([Sample(np.array([1, 2, 3])), Sample(np.array([4, 5]))], budget=8)
    >>> pack.tokens.tolist(), pack.labels.tolist(), pack.cu_seqlens.tolist()
    ([1, 2, 3, 4, 5], [-100, 2, 3, -100, 5], [0, 3, 5])
    >>> pack.lengths.tolist(), pack.fill, pack.num_label_tokens
    ([3, 2], 0.625, 3)
    """

    tokens: np.ndarray
    explicit_labels: np.ndarray | None
    cu_seqlens: np.ndarray
    budget: int
    samples: np.ndarray
    sources: np.ndarray
    first_positions: np.ndarray
    index: int = -1
    cursor: dict = field(default_factory=dict)
    parent_label_counts: np.ndarray | None = None
    targets: list[Any] | None = None
    images: list[Any] | None = None

    def __post_init__(self):
        assert self.cu_seqlens.item(-1) == len(self.tokens) <= self.budget
        assert self.explicit_labels is None or len(self.explicit_labels) == len(self.tokens)

    @classmethod
    def of(cls, samples: Sequence[Sample], budget: int, **fields: Any) -> Pack:
        """Concatenate full samples.

        Args:
            samples: the documents, in the order of the row.
            budget: tokens that the pack may hold; more are refused.
            fields: other fields of the pack, such as `index`.
        """
        lengths = [len(sample) for sample in samples]
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        if cu_seqlens[-1] > budget:
            raise ValueError(f"{cu_seqlens[-1]} tokens do not fit a budget of {budget}")
        empty, targets = np.empty(0, np.int64), [sample.target for sample in samples]
        fields.setdefault("samples", np.arange(len(samples), dtype=np.int64))
        return cls(
            tokens=np.concatenate([empty, *(sample.tokens for sample in samples)]),
            explicit_labels=np.concatenate([empty, *(sample.labels for sample in samples)]),
            cu_seqlens=cu_seqlens,
            budget=budget,
            sources=np.array([sample.source for sample in samples], np.int16),
            first_positions=np.zeros(len(samples), np.int64),
            targets=None if all(target is None for target in targets) else targets,
            images=[sample.images for sample in samples],
            **fields,
        )

    @property
    def labels(self) -> np.ndarray:
        """int64 [T], IGNORE_INDEX at the first token of every sequence."""
        if self.explicit_labels is None:
            labels = self.tokens.copy()
            labels[self.cu_seqlens[:-1]] = IGNORE_INDEX
            self.explicit_labels = labels
        return self.explicit_labels

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.cu_seqlens)

    @property
    def fill(self) -> float:
        """Fraction of the budget that holds tokens."""
        return len(self.tokens) / self.budget

    @property
    def num_label_tokens(self) -> int:
        """Number of tokens that contribute to the loss."""
        if self.explicit_labels is None:
            return len(self.tokens) - len(self.samples)
        return int(np.count_nonzero(self.labels != IGNORE_INDEX))
