"""One rank's batches of a run, in whole optimizer steps, and the data state of what was stepped.

    PackedDataset ─▶ DataLoader workers ─▶ window of `accumulation` batches ─▶ count over ranks ─▶ batch
                                                     │
                                                     └─ state: after the last batch of the last whole window

The loader looks one window ahead, so that every batch can carry the number of tokens that its
whole optimizer step counts. What was fetched but not stepped is not in the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np
from torch.utils.data import DataLoader

from ..collators import PackedCollator
from ..packing import Pack, PackedDataset


@dataclass(frozen=True, slots=True, eq=False)
class PackInfo:
    """What is kept of a pack once its tokens are in a batch."""

    index: int
    cursor: dict
    budget: int
    lengths: np.ndarray
    counted: int

    @classmethod
    def of(cls, pack: Pack) -> PackInfo:
        return cls(pack.index, pack.cursor, pack.budget, pack.lengths, pack.counted)


class PackedLoader:
    """Iterate the batches of this rank's packs; iterate again for the next epoch or after a load.

    Every batch carries `num_items_in_batch`, scaled so that a trainer that divides the loss by
    the accumulation steps and averages gradients over ranks arrives at the exact token mean of
    the optimizer step. The mean of the losses over micro-batches and ranks is that token mean.
    """

    batch_size = 1  # what DeepSpeed asks every loader for

    def __init__(
        self,
        dataset: PackedDataset,
        collator: Callable[[Pack], dict[str, Any]] | None = None,
        *,
        accumulation: int = 1,
        num_workers: int = 0,
        pin_memory: bool = False,
    ):
        self.dataset = dataset
        self.accumulation = accumulation
        self.last: PackInfo | None = None
        """The pack of the batch handed out last."""
        self.stepped: PackInfo | None = None
        """The last pack of the last whole optimizer step."""
        self._loader = DataLoader(
            dataset,
            batch_size=None,
            collate_fn=partial(_collate, collator or PackedCollator()),
            num_workers=num_workers,
            pin_memory=pin_memory,
        )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        windows = _windows(iter(self._loader), self.accumulation)
        for window, is_last in _mark_last(windows):
            yield from self._step(window, is_last)

    def _step(self, window: Window, is_last: bool) -> Iterator[dict[str, Any]]:
        items = self.count([info for _, info in window])
        for (batch, info), ends_window in _mark_last(window):
            self.last = info
            if ends_window:
                self.stepped = info
                self.on_step_end(is_last)
            yield self.place({**batch, "num_items_in_batch": items})

    def count(self, infos: list[PackInfo]) -> Any:
        """Return the counted tokens of a window over all ranks, per micro-batch and rank."""
        return max(1, sum(info.counted for info in infos)) / self.accumulation

    def place(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Move a batch to where the model is."""
        return batch

    def on_step_end(self, is_last: bool) -> None:
        """Hear that a step's last batch is handed out, and whether the stream ends with it."""


Window = list[tuple[dict[str, Any], PackInfo]]
T = TypeVar("T")


def _collate(collator: Callable[[Pack], dict[str, Any]], pack: Pack) -> tuple[dict, PackInfo]:
    return collator(pack), PackInfo.of(pack)


def _windows(pairs: Iterator[tuple[dict, PackInfo]], size: int) -> Iterator[Window]:
    while window := list(islice(pairs, size)):
        yield window


def _mark_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Pair every item with whether it is the last.

    >>> list(_mark_last("ab"))
    [('a', False), ('b', True)]
    """
    iterator = iter(items)
    for held in iterator:
        for item in iterator:
            yield held, False
            held = item
        yield held, True
