"""A pack: samples laid end to end, at most `budget` tokens, with their boundaries.

    tokens      [ a a a a | b b | c c c ]
    labels      [ . a a a | . b | . c c ]      . = -100, at the head of every sequence
    cu_seqlens  [ 0         4     6       9 ]

A pack cannot be built without its boundaries, so nothing downstream has to guess them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .sample import IGNORE_INDEX, Sample


@dataclass(slots=True, eq=False)
class Pack:
    """N sequences in one flat row; a sequence is a sample or a part of a split one.

    A value: nothing changes it once it is given out. It is not declared frozen only because that
    would cost 2 µs a pack, a third of what making one takes.

    >>> pack = Pack.of([Sample(np.array([1, 2, 3])), Sample(np.array([4, 5]))], budget=8)
    >>> pack.tokens.tolist(), pack.labels.tolist(), pack.cu_seqlens.tolist()
    ([1, 2, 3, 4, 5], [-100, 2, 3, -100, 5], [0, 3, 5])
    >>> pack.lengths.tolist(), pack.fill, pack.counted
    ([3, 2], 0.625, 3)
    """

    tokens: np.ndarray
    """int64 [T]."""
    marks: np.ndarray | None
    """int64 [T]: the labels; None where all tokens count, but for the heads: see `labels`."""
    cu_seqlens: np.ndarray
    """int32 [N+1], from 0 to T. N = 0 is the empty pack of weight zero that evens out ranks."""
    budget: int
    samples: np.ndarray
    """int64 [N]: the number of each sequence's sample in its source, in the order it was read."""
    sources: np.ndarray
    """int16 [N]: the source of the mixture each sequence came from."""
    first_positions: np.ndarray
    """int64 [N]: position of each sequence's first token; 0 unless split parts continue."""
    index: int = -1
    """Place of this pack in the run's global sequence, -1 outside a run."""
    cursor: dict = field(default_factory=dict)
    """What a resume needs to continue after this pack, where the index alone does not say it."""

    wholes: np.ndarray | None = None
    """int64 [N]: of a part, how many tokens count in its whole sample; of a whole sample, 0.
    None where no sample was split."""

    def __post_init__(self):
        assert self.cu_seqlens.item(-1) == len(self.tokens) <= self.budget
        assert self.marks is None or len(self.marks) == len(self.tokens)

    @classmethod
    def of(cls, samples: Sequence[Sample], budget: int, **fields) -> Pack:
        """Lay whole samples end to end."""
        lengths = [len(sample) for sample in samples]
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        if cu_seqlens[-1] > budget:
            raise ValueError(f"{cu_seqlens[-1]} tokens do not fit a budget of {budget}")
        empty = np.empty(0, np.int64)
        fields.setdefault("samples", np.arange(len(samples), dtype=np.int64))
        return cls(
            tokens=np.concatenate([empty, *(s.tokens for s in samples)]),
            marks=np.concatenate([empty, *(s.labels for s in samples)]),
            cu_seqlens=cu_seqlens,
            budget=budget,
            sources=np.array([s.source for s in samples], np.int16),
            first_positions=np.zeros(len(samples), np.int64),
            **fields,
        )

    @property
    def labels(self) -> np.ndarray:
        """int64 [T], IGNORE_INDEX at the head of every sequence."""
        if self.marks is None:
            labels = self.tokens.copy()
            labels[self.cu_seqlens[:-1]] = IGNORE_INDEX
            self.marks = labels
        return self.marks

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.cu_seqlens)

    @property
    def fill(self) -> float:
        """Share of the budget that holds tokens."""
        return len(self.tokens) / self.budget

    @property
    def counted(self) -> int:
        """Number of tokens that count for the loss."""
        if self.marks is None:
            return len(self.tokens) - len(self.samples)
        return int(np.count_nonzero(self.labels != IGNORE_INDEX))
