"""Packs to optimizer steps: a step has packs with tokens, and no step is empty on every rank.

    worker 0   [pack 0] [pack 2] [pack 4]      one rank        [pack 0] [pack 1] | [pack 2] [pack 4]
    worker 1   [pack 1] [empty ] [empty ]      several ranks   a step is left out if it is empty
                                                               on all of them

Shards of a stream end at different times, and empty packs take the places of those that have ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from ...packing import Pack
from ...runtime import HostCopy

Batch = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class PackInfo:
    """Describes a pack whose tokens are in a batch: lengths, sources and position in the data."""

    index: int
    cursor: dict
    budget: int
    lengths: np.ndarray
    loss_weight: float
    """The pack's weight in the mean: its label tokens, or with `mean="sample"` its samples."""
    sources: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int16))
    samples: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """For each sequence, the index of its sample in its source."""

    @classmethod
    def of(cls, pack: Pack, batch: Batch) -> PackInfo:
        weight = pack.num_label_tokens
        if "loss_weights" in batch:
            weight = float(batch["loss_weights"].sum())
        ids = pack.sources, pack.samples
        return cls(pack.index, pack.cursor, pack.budget, pack.lengths, weight, *ids)

    def __str__(self) -> str:
        if not len(self.samples):
            return f"pack {self.index}"
        return f"pack {self.index} (up to sample {self.samples[-1]} of source {self.sources[-1]})"


@dataclass(slots=True)
class StepBatches:
    """The batches of one optimizer step on this rank, and the data state after it."""

    batches: list[tuple[Batch, PackInfo]]
    state: dict
    weight: HostCopy | None
    """The loss weight of the step over all ranks: summed a step ahead, read when it is issued."""
    tokens: HostCopy | None = None
    """The tokens of the step over all ranks, where they may be none."""


def take_packs(
    packs: Iterator[tuple[Batch, PackInfo]], count: int, keep_empty: bool
) -> tuple[list[tuple[Batch, PackInfo]], list[Any]]:
    """Return the next `count` batches, and all packs read for them: empty ones may be left out."""
    batches, read = [], []
    while len(batches) < count and (pair := next(packs, None)) is not None:
        read.append(pair[1])
        if keep_empty or len(pair[1].lengths):
            batches.append(pair)
    return batches, read


def skip_empty(steps: Iterable[StepBatches]) -> Iterator[StepBatches]:
    """Leave out the steps that have no tokens on any rank.

    The sum over ranks is read one step after it was started, so that nobody waits for it.
    """
    for step, _ in mark_last(steps):
        if step.tokens is None or float(step.tokens.read()):
            yield step


def mark_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Pair every item with whether it is the last, one item behind.

    >>> list(mark_last("ab"))
    [('a', False), ('b', True)]
    """
    iterator = iter(items)
    for pending in iterator:
        for item in iterator:
            yield pending, False
            pending = item
        yield pending, True
