"""Group batches of packs into optimizer steps; skip steps that are empty on every rank.

    worker 0   [pack 0] [pack 2] [pack 4]      one rank        [pack 0] [pack 1] | [pack 2] [pack 4]
    worker 1   [pack 1] [empty ] [empty ]      several ranks   a step is skipped if it is empty
                                                               on all of them

Shards of a stream end at different times, and empty packs replace the packs of those that have
ended. With several ranks, the loader ends when one pack of every shard, in a row, was empty on all.
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
    """Describes the pack of a batch without its tokens, as in `loader.last_pack`.

    >>> info = PackInfo(7, {}, 16, np.array([5, 3]), loss_weight=6.0, num_label_tokens=6)
    >>> info.num_tokens, info.fill
    (8, 0.5)
    """

    index: int
    """The pack's number in the pass over the data, counted over all ranks."""
    cursor: dict
    """What a resume after this pack needs."""
    budget: int
    """Tokens that the pack may hold."""
    lengths: np.ndarray
    """Tokens of each sequence; none in an empty pack, which completes a step."""
    loss_weight: float
    """The pack's weight in the mean: its label tokens, or with `mean="sample"` its samples."""
    num_label_tokens: int
    """Tokens that count for the loss."""
    sources: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int16))
    """For each sequence, the index of its source in a mixture."""
    samples: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """For each sequence, the index of its sample in its source."""

    @classmethod
    def of(cls, pack: Pack, batch: Batch) -> PackInfo:
        """Describe a `pack`, of which `batch` was made."""
        labels = weight = pack.num_label_tokens
        if "loss_weights" in batch:
            weight = float(batch["loss_weights"].sum())
            labels = int(batch["loss_weights"].count_nonzero())
        place, ids = (pack.index, pack.cursor, pack.budget), (pack.sources, pack.samples)
        return cls(*place, pack.lengths, weight, labels, *ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of the pack, without padding."""
        return int(self.lengths.sum())

    @property
    def fill(self) -> float:
        """Fraction of the budget that holds tokens."""
        return self.num_tokens / self.budget

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
    """The tokens of the step over all ranks, if there may be none."""


def take_packs(
    packs: Iterator[tuple[Batch, PackInfo]], count: int, keep_empty: bool
) -> tuple[list[tuple[Batch, PackInfo]], list[Any]]:
    """Return the next `count` batches, and all packs read for them: empty ones may be omitted."""
    batches, read = [], []
    while len(batches) < count and (pair := next(packs, None)) is not None:
        read.append(pair[1])
        if keep_empty or len(pair[1].lengths):
            batches.append(pair)
    return batches, read


def skip_empty(steps: Iterable[StepBatches], max_empty: int) -> Iterator[StepBatches]:
    """Skip the steps that have no tokens on any rank; end after `max_empty` of them in a row.

    The sum over ranks is read one step after it was started, so that nobody waits for it.
    """
    empty = 0
    for step, _ in mark_last(steps):
        if step.tokens is None or float(step.tokens.read()):
            empty = 0
            yield step
        elif (empty := empty + 1) == max_empty:
            return


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
