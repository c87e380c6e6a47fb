"""`PackedLoader`: batches of a rank, each with its step's label count and the data state after.

    PackedDataset ─▶ DataLoader workers ─▶ StepBatches: the packs of one optimizer step ─▶ batches
                                              │
                                              ├─ label tokens, summed over ranks: in every batch
                                              └─ data state: saved once the step was issued

The loader reads one optimizer step ahead, so that every batch can carry the number of label tokens
of its optimizer step. If a step may be empty on every rank, which is known one step later, it reads
two steps ahead. Packs that were read but not yet issued are not part of the state.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

from ...collators import PackedCollator
from ...packing import Pack, PackedDataset, Sample, check_flags
from ...packing.encoding import NO_PACKS
from ...runtime import (
    HostCopy,
    Layout,
    find_layout,
    gather_objects,
    is_current,
    rank,
    sum_over_ranks,
    world_size,
)
from .layout_check import check_first_step
from .model_limits import ModelLimits
from .optimizer_steps import Batch, PackInfo, StepBatches, mark_last, skip_empty, take_packs
from .worker_watch import WorkerWatch

NO_STEPS = (
    "the data has too few packs for one optimizer step, and drop_last=True drops them: omit it, "
    "or lower the accumulation steps"
)
NO_LABELS = (
    "no label of the first steps counts for the loss: check the labels (a chat template without "
    "marked answers leaves none)"
)
MAX_UNLABELLED_STEPS = 16
"""Steps that are read in search of a label that counts, before the first one is trained."""


class PackedLoader:
    """Iterate over the batches of this rank's packs; iterate again for the next epoch.

    If an iteration is left early, the next one continues after the last complete optimizer step.

    Every batch carries `num_items_in_batch`, scaled for trainers that divide the loss by the
    accumulation steps and average gradients over ranks: the gradient is then that of the exact
    token mean of the optimizer step, and the mean of the losses over micro-batches and ranks is
    that token mean.

    Args:
        dataset: the packs to read.
        collator: a `PackedCollator` with your options; default: one without options.
        accumulation_steps: packs per optimizer step and rank.
        num_workers: processes that read packs; with 0, this process reads them.
        pin_memory: as in torch's DataLoader.
        prefetch_factor: packs that each worker reads ahead, as in torch's DataLoader.
        multiprocessing_context: context of the workers, as in torch's DataLoader.
        drop_last: drop an incomplete last step instead of completing it with empty packs.
        count_items: add `num_items_in_batch`; off for trainers that count labels themselves.
        layout: the data-parallel layout of the ranks; default: detected when iteration starts.
    """

    batch_size = 1  # DeepSpeed reads it from every loader
    _checks_layout = True
    _is_accelerate_prepared = True  # otherwise Accelerate would dispatch and slice our batches

    layers: str | None = None
    """The layers that train, compiled or stock; before the start, those of the loaded run."""

    def __init__(
        self,
        dataset: PackedDataset,
        collator: Callable[[Pack], Batch] | None = None,
        *,
        accumulation_steps: int = 1,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        multiprocessing_context: Any = None,
        drop_last: bool = False,
        count_items: bool = True,
        layout: Layout | None = None,
    ):
        if not isinstance(dataset, PackedDataset):
            raise ValueError(f"dataset is a {type(dataset).__name__}: pass a PackedDataset")
        if not isinstance(accumulation_steps, int) or accumulation_steps < 1:
            raise ValueError(
                f"accumulation_steps={accumulation_steps!r}: a step needs at least one pack"
            )
        check_flags(drop_last=drop_last)
        check_collator(collator)
        self.dataset = dataset
        self.collator = collator or PackedCollator()
        self.accumulation_steps = accumulation_steps
        self.drop_last, self.count_items = drop_last, count_items
        self.last_pack: PackInfo | None = None
        """The pack of the last batch that was issued: tokens, label tokens, fill, samples."""
        self.issued: deque[tuple[PackInfo, dict | None]] = deque(maxlen=4 * accumulation_steps + 64)
        """The packs that were issued, each with the data state after it if it ends a step."""
        self.first_step_check: Callable[[list[Batch]], bool] | None = None
        """Called with the batches of a step, before the first batch is issued; returns whether
        labels count, and is called with the next step if none do."""
        self.limits: ModelLimits | None = None
        """The limits of the model; batches beyond them are refused."""
        self.wait_seconds = 0.0
        """Seconds the trainer has waited for data."""
        self.layout = layout
        self.saved_packs_per_step: int | None = None
        """Packs per optimizer step of the run that was loaded, until an iteration starts."""
        self._state: dict | None = None
        self._state_before: dict | None = None
        """The state before the last step that was issued."""
        self._same_data = False
        """Whether all ranks were found to have the same data."""
        self._last_read: PackInfo | None = None
        self._overflow_counts: tuple[Any, dict[str, int]] = None, {}
        self._packs_of_epoch: tuple[Any, int] = None, 1
        self._loader = DataLoader(
            dataset,
            batch_size=None,
            collate_fn=partial(_collate, self.collator),  # pyright: ignore[reportArgumentType]
            num_workers=num_workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            multiprocessing_context=multiprocessing_context,
            # Otherwise each iteration would draw the workers' seed from the global generator,
            # which dropout uses.
            generator=torch.Generator().manual_seed(torch.initial_seed()),
        )

    def __iter__(self) -> Iterator[Batch]:
        self._place()
        self._check_same_data()
        self._say_other_step_size()
        if self._state is not None:
            self.dataset.load_state_dict(self._state)
        self.dataset.start_next_pass()
        self.dataset.mark_trained()  # no step yet: from now on the state follows steps, not reads
        self._state = self.dataset.state_dict()
        self.dataset.count_until(self._state)
        steps = self._steps()
        if self._may_be_empty():
            steps = skip_empty(steps, self._steps_over_all_shards())
        begins, is_last = self._state["position"]["index"] == 0, False
        steps = self._check_first_steps(steps, begins)
        for step, is_last in mark_last(steps):
            if is_last:  # trainers save before they ask for more, and resume with the next pass
                step.state = self.dataset.end_pass()
            yield from self._issue(step, is_last)
        if begins and not is_last:  # not a single step
            raise ValueError(NO_STEPS if self.drop_last else NO_PACKS)
        self.dataset.end_pass()
        self._state = None

    def __len__(self) -> int:
        return self.pass_length()

    def pass_length(self) -> int:
        """Count the batches of a pass on this rank; TypeError if the data has no known end."""
        steps = len(self.dataset) / self.accumulation_steps
        return (math.floor(steps) if self.drop_last else math.ceil(steps)) * self.accumulation_steps

    def __bool__(self) -> bool:
        return True  # without counting

    def _place(self) -> None:
        if self.layout is None or not is_current(self.layout):
            self.layout = self._find_layout()
        self.dataset.place(self.layout)

    def _find_layout(self) -> Layout:
        return find_layout()

    @property
    def packs_at_a_time(self) -> int:
        """The number of packs that all ranks together train at a time."""
        self._place()
        return self.dataset.ranks()[1]

    @property
    def packs_per_step(self) -> int:
        """The number of packs in an optimizer step, over all ranks."""
        return self.packs_at_a_time * self.accumulation_steps

    def _say_other_step_size(self) -> None:
        """Report, on the first rank, a change in the number of packs per step since the save."""
        saved, self.saved_packs_per_step = self.saved_packs_per_step, None
        ranks, now = self.packs_at_a_time, self.packs_per_step
        if saved is None or saved == now or rank():
            return
        advice = f"accumulate {saved // ranks} packs per rank"
        if saved % ranks:
            advice = f"start a number of ranks that divides {saved}"
        tqdm.write(
            f"nopad: an optimizer step now has {now} packs; in the saved run it had {saved}. To "
            f"keep {saved}, {advice}"
        )

    def _check_same_data(self) -> None:
        """Raise on all ranks if one has other data or settings; compared at the first iteration."""
        if self._same_data:
            return
        self._same_data = True
        own = {"fingerprint": self.dataset.fingerprint, **self.dataset.settings}
        first, *others = gather_objects(own)
        for number, other in enumerate(others, start=1):
            for name, value in first.items():
                if other[name] != value:
                    raise ValueError(
                        f"the data differs between ranks: {name} is {value} on rank 0, "
                        f"{other[name]} on rank {number}; open the same data on every rank"
                    )

    def state(self) -> dict:
        """Return this rank's view of the data state after the last step that was issued."""
        return self._state or self.dataset.state_dict()

    def load_state(self, state: dict) -> None:
        """Continue from a saved `state` at the next iteration."""
        self._state = None
        self.dataset.load_state_dict(state)

    def skip_epoch(self) -> None:
        """Continue with the epoch after the current one at the next iteration."""
        done = self.epochs_done()
        assert done is not None, "the epochs of a stream have no known end"
        state, epoch = self.state(), math.floor(done) + 1
        position = state["position"]
        skipped = range(position["epoch"], epoch)
        start = position["epoch_start"] + sum(map(self.dataset.count, skipped))
        end_epoch = position["end_epoch"]
        moved = {"epoch": epoch, "epoch_start": start, "index": start, "end_epoch": end_epoch}
        ends_pass = epoch == position["end_epoch"] or start >= (self.dataset.max_packs or math.inf)
        self.load_state({**state, "position": moved, "finished": ends_pass})

    def epochs_done(self) -> float | None:
        """Return how many epochs were read so far; None for a stream, whose end is unknown."""
        if self.dataset.lengths is None:
            return None
        position = self.state()["position"]
        epoch, done = position["epoch"], position["index"] - position["epoch_start"]
        if self._packs_of_epoch[0] != epoch:
            self._packs_of_epoch = epoch, max(1, self.dataset.count(epoch))
        return epoch + done / self._packs_of_epoch[1]

    def overflow_counts(self) -> dict[str, int]:
        """Count split, truncated, dropped and skipped samples: of the epoch, or a stream so far."""
        position = self.state()["position"]
        epoch = position["epoch"]
        if position["end_epoch"] is not None:
            epoch = min(epoch, position["end_epoch"] - 1)  # after the last epoch, report that one
        if self.dataset.lengths is None or self._overflow_counts[0] != epoch:
            report = self.dataset.report(epoch)
            counts = {name: report[name] for name in ("split", "truncated", "dropped")}
            self._overflow_counts = epoch, {**counts, "skipped": report["skipped"]["rows"]}
        return self._overflow_counts[1]

    def _may_be_empty(self) -> bool:
        """Return whether a step may have no tokens on any rank: all its shards may have ended."""
        streams = self.dataset.lengths is None and self.dataset.epochs is not None
        # Ranks that were named without a process group cannot sum their tokens.
        return streams and 1 < self.dataset.ranks()[1] <= world_size()

    def _steps_over_all_shards(self) -> int:
        """Return the steps in which every shard of a stream gives a pack, or has ended."""
        packs = self.dataset.ranks()[1] * self.accumulation_steps
        return math.ceil(self.dataset.settings["shards"] / packs)

    def _steps(self) -> Iterator[StepBatches]:
        packs, size = iter(self._loader), self.accumulation_steps
        several_ranks, sums_tokens = self.dataset.ranks()[1] > 1, self._may_be_empty()
        workers = getattr(packs, "_workers", ())
        with WorkerWatch(workers, lambda: self._last_read or "nothing") as watch:
            while True:
                start = time.perf_counter()
                with watch.reading():
                    batches, read = take_packs(packs, size, keep_empty=several_ranks)
                self.wait_seconds += time.perf_counter() - start
                if not batches:
                    self.dataset.mark_trained(*read)
                if not batches or (len(batches) < size and self.drop_last):
                    return
                self._last_read = batches[-1][1]
                state = self.dataset.state_after(*read)
                batches += [self._empty(batches[0][1]) for _ in range(size - len(batches))]
                weight = self._sum_weights(sum(info.loss_weight for _, info in batches))
                tokens = sum(float(info.lengths.sum()) for _, info in batches)
                total = HostCopy(sum_over_ranks(tokens)) if sums_tokens else None
                yield StepBatches(batches, state, weight, total)

    def _sum_weights(self, weight: float) -> HostCopy | None:
        return HostCopy(sum_over_ranks(weight)) if self.count_items else None

    def _empty(self, template: PackInfo) -> tuple[Batch, PackInfo]:
        return _collate(self.collator, Pack.of([], template.budget))

    def _check_layout(self, step: StepBatches) -> None:
        """Raise on all ranks if ranks of one replica have read different packs."""
        assert self.layout is not None
        batches, first = [batch for batch, _ in step.batches], step.batches[0][1]
        check_first_step(self.layout, self.dataset.ranks(), first.index, batches)

    def _check_first_steps(
        self, steps: Iterator[StepBatches], begins: bool
    ) -> Iterator[StepBatches]:
        """Hold the first steps back until one of them has a label that counts.

        begins: they are the first of the pass.
        """
        held, check = [], self.first_step_check
        if check is not None:
            for step in islice(steps, MAX_UNLABELLED_STEPS):
                held.append(step)
                if check([batch for batch, _ in step.batches]):
                    self.first_step_check = None
                    break
            is_tail = len(held) < MAX_UNLABELLED_STEPS and not begins  # of a resumed pass
            if held and self.first_step_check is not None and not is_tail:
                raise ValueError(NO_LABELS)
        yield from chain(held, steps)

    def _issue(self, step: StepBatches, is_last: bool) -> Iterator[Batch]:
        if self._checks_layout:
            self._check_layout(step)
            self._checks_layout = False
        if self.limits is not None:
            for batch, info in step.batches:
                self.limits.check(batch, f"pack {info.index}")
        extra = {}
        if self.count_items:
            extra["num_items_in_batch"] = self._items(step)
        for (batch, info), ends_step in mark_last(step.batches):
            self.last_pack = info
            self.issued.append((info, step.state if ends_step else None))
            if ends_step:
                self._state_before, self._state = self._state, step.state
                self.dataset.count_until(step.state)
                self.on_step_end(is_last)
            yield self.to_device({**batch, **extra})

    def _items(self, step: StepBatches) -> float:
        """Return what each micro-batch divides by: the step's loss weight / (batches x replicas).

        A number, not a tensor: FSDP casts tensors of floats to bf16, 16358 to 16384.
        """
        assert step.weight is not None
        return self._per_replica(float(step.weight.read())) / self.accumulation_steps

    def _per_replica(self, total: float) -> float:
        """Return the mean over the replicas of the model, from a sum over all ranks.

        Every pack counts once, however many ranks have read it.
        """
        readers = max(1, world_size() // self.dataset.ranks()[1])
        return max(total / readers, 1.0) / (world_size() // readers)

    def to_device(self, batch: Batch) -> Batch:
        """Move a `batch` to the model's device."""
        return batch

    def on_step_end(self, is_last: bool) -> None:
        """Called when the last batch of a step is issued; `is_last`: the data ends with it."""


class UnsizedLoader(PackedLoader):
    """A loader for trainers that would cut every epoch to the packs of the first.

    The epochs of one data set may have different numbers of packs.
    """

    def __len__(self) -> int:
        raise TypeError("the number of packs may differ between passes")


class EvaluationLoader(PackedLoader):
    """Iterate over a data set, or its first packs, once, from the beginning each time.

    The plain mean of the batch losses over batches and ranks is the token mean of the data set. The
    label tokens are counted in a first read, so that at most two batches are held at a time.
    """

    def __init__(
        self,
        dataset: PackedDataset,
        collator: Callable[[Pack], Batch] | None = None,
        limit: int | None = None,
        layout: Layout | None = None,
    ):
        """Count the packs to read.

        Args:
            dataset: the packs to evaluate on; their lengths must be known.
            collator: a `PackedCollator` with your options; default: one without options.
            limit: evaluate at most this many packs per rank.
            layout: the data-parallel layout of the ranks; default: detected when iteration starts.
        """
        super().__init__(dataset, collator, layout=layout)
        if limit is not None and (not isinstance(limit, int) or limit < 0):
            raise ValueError(f"limit={limit!r}: pass a number of packs, or None for all")
        total = min(dataset.count(), dataset.max_packs or sys.maxsize)
        packs_per_rank = math.ceil(total / self.packs_at_a_time)
        self.packs = packs_per_rank if limit is None else min(packs_per_rank, limit)
        """Packs of this rank; the same number on every rank."""
        self.samples = 0
        """Samples over all ranks; counted in the first read."""
        self._items_per_pack: float | None = None

    def __len__(self) -> int:
        return self.packs

    def __iter__(self) -> Iterator[Batch]:
        if not self.packs:
            return iter(())
        self._place()
        self._check_same_data()
        if self._items_per_pack is None:
            self.dataset.rewind()
            counts = torch.zeros(2, dtype=torch.float64)
            for _, info in islice(self._loader, self.packs):
                counts += torch.tensor([info.loss_weight, len(info.lengths)])
            weight, samples = sum_over_ranks(counts).tolist()
            self._items_per_pack = self._per_replica(weight) / self.packs
            self.samples = round(samples / max(1, world_size() // self.packs_at_a_time))
        self.dataset.rewind()
        self._state = None
        return islice(super().__iter__(), self.packs)

    def _sum_weights(self, weight: float) -> None:
        return None

    def _items(self, step: StepBatches) -> float:
        assert self._items_per_pack is not None
        return self._items_per_pack


def check_collator(collator: Callable[[Pack], Batch] | None) -> None:
    """Refuse collators that do not turn a pack into a batch with labels, such as padding ones."""
    if collator is None:
        return
    name = getattr(collator, "__name__", type(collator).__name__)
    try:
        batch = collator(Pack.of([Sample(np.zeros(1, np.int64))], budget=1))
    except Exception as error:  # a collator of samples may fail in any way
        raise ValueError(
            f"{name} cannot collate a pack ({type(error).__name__}: {error}): pass a "
            "PackedCollator, or omit it"
        ) from error
    if "labels" not in batch:
        raise ValueError(
            f"{name} returns a batch without labels, which the loss needs: keep those of "
            "PackedCollator"
        )


def _collate(collator: Callable[[Pack], Batch], pack: Pack) -> tuple[Batch, PackInfo]:
    batch = collator(pack)
    return batch, PackInfo.of(pack, batch)
