"""One rank's batches of a run, in whole optimizer steps, and the data state of what was stepped.

    PackedDataset ─▶ DataLoader workers ─▶ window: one step's packs ─▶ count over ranks ─▶ batches
                                              │
                                              └─ state: after the last whole window handed out

The loader looks one window ahead, so that every batch can carry the number of tokens that its
whole optimizer step counts. What was fetched but not stepped is not in the state.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader

from ...collators import PackedCollator
from ...packing import Pack, PackedDataset
from ...runtime import sum_over_ranks, world_size
from .worker_watch import WorkerWatch

Batch = dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class PackInfo:
    """What is kept of a pack once its tokens are in a batch."""

    index: int
    cursor: dict
    budget: int
    lengths: np.ndarray
    counted: float
    """What the pack weighs in the mean: its counted tokens, or its counted samples."""
    sources: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int16))
    samples: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """Which of its source's samples each sequence is."""

    @classmethod
    def of(cls, pack: Pack, batch: Batch) -> PackInfo:
        counted = pack.num_label_tokens
        if "loss_weights" in batch:
            counted = float(batch["loss_weights"].sum())
        where = pack.sources, pack.samples
        return cls(pack.index, pack.cursor, pack.budget, pack.lengths, counted, *where)

    def __str__(self) -> str:
        if not len(self.samples):
            return f"pack {self.index}"
        return f"pack {self.index} (to sample {self.samples[-1]} of source {self.sources[-1]})"


@dataclass(slots=True)
class _Window:
    """The batches of one optimizer step on this rank, and the data state behind them."""

    pairs: list[tuple[Batch, PackInfo]]
    state: dict


class PackedLoader:
    """Iterate the batches of this rank's packs; iterate again for the next epoch.

    An iteration that was left before its end goes on behind the last whole step.

    Every batch carries `num_items_in_batch`, scaled so that a trainer that divides the loss by
    the accumulation steps and averages gradients over ranks arrives at the exact token mean of
    the optimizer step. The mean of the losses over micro-batches and ranks is that token mean.
    """

    batch_size = 1  # what DeepSpeed asks every loader for
    _is_accelerate_prepared = True  # else Accelerate would dispatch and slice our rows

    def __init__(
        self,
        dataset: PackedDataset,
        collator: Callable[[Pack], Batch] | None = None,
        *,
        accumulation: int = 1,
        num_workers: int = 0,
        pin_memory: bool = False,
        last_window: Literal["pad", "drop"] = "pad",
        with_items: bool = True,
    ):
        """Say how packs become steps.

        last_window: fill the last step with empty packs of weight zero, or leave it out.
        with_items: off for trainers that count the step's tokens themselves.
        """
        if last_window not in ("pad", "drop"):
            raise ValueError(f"last_window={last_window!r}: 'pad' or 'drop'")
        if accumulation < 1:
            raise ValueError(f"accumulation={accumulation}: a step needs at least one pack")
        self.dataset = dataset
        self.collator = collator or PackedCollator()
        self.accumulation = accumulation
        self.last_window = last_window
        self.with_items = with_items
        self.last: PackInfo | None = None
        """The pack of the batch handed out last."""
        self.handed_out: deque[tuple[PackInfo, dict | None]] = deque(maxlen=4 * accumulation + 64)
        """The packs handed out, each with the state behind it where it ends a step."""
        self.first_check: Callable[[list[Batch]], None] | None = None
        """Called once, with the batches of the first step, before any of them is handed out."""
        self.positions: int | None = None
        """How many the model has; a batch that reaches beyond them is refused."""
        self.waited = 0.0
        """Seconds this loader let its trainer wait for data."""
        self._state: dict | None = None
        self._came: PackInfo | None = None
        self._became: tuple[Any, dict[str, int]] = None, {}
        self._packs: tuple[Any, int] = None, 1
        self._loader = DataLoader(
            dataset,
            batch_size=None,
            collate_fn=partial(_collate, self.collator),  # pyright: ignore[reportArgumentType]
            num_workers=num_workers,
            pin_memory=pin_memory,
            # Else each iteration would draw the workers' seed from the numbers that dropout draws.
            generator=torch.Generator().manual_seed(torch.initial_seed()),
        )

    def __iter__(self) -> Iterator[Batch]:
        if self._state is not None:
            self.dataset.load_state_dict(self._state)
        self.dataset.start_next_pass()
        self.dataset.mark_trained()  # none yet: from now on the state follows steps, not reads
        self._state = self.dataset.state_dict()
        for window, is_last in _mark_last(self._windows()):
            if is_last:  # trainers save before they ask for more, and go on with the next pass
                window.state = self.dataset.end_pass()
            yield from self._step(window, is_last)
        self.dataset.end_pass()
        self._state = None

    def state(self) -> dict:
        """Return this rank's view of the data state after the last step handed out."""
        return self._state or self.dataset.state_dict()

    def epochs(self) -> float | None:
        """Return how often the data was gone over so far; None for a stream: who knows its end."""
        if self.dataset.lengths is None:
            return None
        position = self.state()["position"]
        epoch, done = position["epoch"], position["index"] - position["epoch_start"]
        if self._packs[0] != epoch:
            self._packs = epoch, max(1, self.dataset.count(epoch))
        return epoch + done / self._packs[1]

    def became(self) -> dict[str, int]:
        """Count the samples split, truncated and dropped: of the epoch, or of a stream so far."""
        position = self.state()["position"]
        epoch = position["epoch"]
        if position["end_epoch"] is not None:
            epoch = min(epoch, position["end_epoch"] - 1)  # behind the last one there is none
        if self.dataset.lengths is None or self._became[0] != epoch:
            account = self.dataset.report(epoch)
            counts = {name: account[name] for name in ("split", "truncated", "dropped")}
            self._became = epoch, {**counts, "skipped": account["skipped"]["rows"]}
        return self._became[1]

    def load_state(self, state: dict) -> None:
        """Go on where a state was taken, from the next iteration on."""
        self._state = None
        self.dataset.load_state_dict(state)

    def _windows(self) -> Iterator[_Window]:
        packs = iter(self._loader)
        workers = getattr(packs, "_workers", ())
        with WorkerWatch(workers, lambda: self._came or "nothing") as watch:
            while True:
                began = time.perf_counter()
                with watch.reading():
                    pairs = list(islice(packs, self.accumulation))
                self.waited += time.perf_counter() - began
                if not pairs or (len(pairs) < self.accumulation and self.last_window == "drop"):
                    return
                self._came = pairs[-1][1]
                state = self.dataset.state_after(*(info for _, info in pairs))
                pairs += [self._empty(pairs[0][1]) for _ in range(self.accumulation - len(pairs))]
                yield _Window(pairs, state)

    def _empty(self, like: PackInfo) -> tuple[Batch, PackInfo]:
        return _collate(self.collator, Pack.of([], like.budget))

    def _step(self, window: _Window, is_last: bool) -> Iterator[Batch]:
        if self.first_check is not None:
            self.first_check([batch for batch, _ in window.pairs])
            self.first_check = None
        self._check_positions(window)
        extra = {}
        if self.with_items:
            extra["num_items_in_batch"] = self._items([info for _, info in window.pairs])
        for (batch, info), ends_window in _mark_last(window.pairs):
            self.last = info
            self.handed_out.append((info, window.state if ends_window else None))
            if ends_window:
                self._state = window.state
                self.on_step_end(is_last)
            yield self.place({**batch, **extra})

    def _check_positions(self, window: _Window) -> None:
        if self.positions is None:
            return
        for batch, info in window.pairs:
            reached = int(batch["position_ids"].max()) + 1
            if reached > self.positions:
                raise ValueError(
                    f"pack {info.index} holds a sequence of {reached} tokens, beyond the model's "
                    f"{self.positions} positions: lower the budget to {self.positions}"
                )

    def _items(self, infos: list[PackInfo]) -> Any:
        """Count a window over all ranks, per micro-batch and rank."""
        total = sum_over_ranks(sum(info.counted for info in infos))
        return total.clamp(min=1).float() / (self.accumulation * world_size())

    def place(self, batch: Batch) -> Batch:
        """Move a batch to where the model is."""
        return batch

    def on_step_end(self, is_last: bool) -> None:
        """Hear that a step's last batch is handed out, and whether the stream ends with it."""


class EvaluationLoader(PackedLoader):
    """A whole set, or its first packs, once, from the beginning each time.

    The plain mean of its batches' losses over batches and ranks is the token mean of the set. What
    the set counts is found by reading it once before, so that no more than two batches are held.
    """

    def __init__(
        self,
        dataset: PackedDataset,
        collator: Callable[[Pack], Batch] | None = None,
        limit: int | None = None,
    ):
        """limit: of each rank, so many packs at most stand for the set."""
        super().__init__(dataset, collator)
        whole = math.ceil(dataset.count() / world_size())
        self.packs = whole if limit is None else min(whole, limit)
        """How many this rank is given; as many as the others."""
        self._share: Any = None

    def __iter__(self) -> Iterator[Batch]:
        if self._share is None:
            self.dataset.rewind()
            infos = (info for _, info in islice(self._loader, self.packs))
            total = sum_over_ranks(sum(info.counted for info in infos))
            self._share = total.clamp(min=1).float() / (self.packs * world_size())
        self.dataset.rewind()
        self._state = None
        return islice(super().__iter__(), self.packs)

    def _items(self, infos: list[PackInfo]) -> Any:
        return self._share


T = TypeVar("T")


def _collate(collator: Callable[[Pack], Batch], pack: Pack) -> tuple[Batch, PackInfo]:
    batch = collator(pack)
    return batch, PackInfo.of(pack, batch)


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
