"""Passes over the packs of a run, and the state that continues one.

pass  ├─ epoch ─┼─ epoch ─┤├─ epoch ─┼─ epoch ─┤      `epochs` epochs, or `max_packs` packs
      start ────▶ trained ──▶ read                    the state refers to the trained packs
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict
from typing import Any

from .ordering.rank_shard import Position, RankShard
from .pack import Pack
from .readers.planned import PlannedPacks
from .readers.streamed import StreamedPacks
from .state.progress import Progress, index_and_cursor
from .state.run_state import VERSION, check_state, is_finished


class ResumablePasses(ABC):
    """Position and state of a dataset whose packs a reader yields."""

    reader: PlannedPacks | StreamedPacks
    settings: dict[str, Any]
    """The settings that determine the sequence of packs."""
    epochs: int | None
    max_packs: int | None
    _start: Progress
    """Where the pass starts, or was resumed."""
    _read: Progress
    _trained: Progress | None
    _counted: dict | None
    """The state up to which `report` counts; None: up to the packs trained, or read."""
    _worker: dict | None
    """The worker of a resumed state."""
    _finished: bool

    fingerprint: Any
    """Identifies the data."""

    @abstractmethod
    def _share(self) -> RankShard:
        """Return the packs of this process or worker."""

    @abstractmethod
    def ranks(self) -> tuple[int, int]:
        """Return rank and world size."""

    @abstractmethod
    def _worker_number(self) -> tuple[int, int] | None:
        """Return the number of this DataLoader worker and of all; None outside of one."""

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, unless the current pass contains it.

        Trainers call it before every epoch, also after a resume, which it must not undo. Without
        it, DataLoader workers repeat the order of the first pass. A dataset without end ignores
        it: it counts its epochs itself, across workers only if they are persistent.
        """
        end_epoch = self._start.position.end_epoch
        if end_epoch is None or self.epochs is None:
            return
        if self._finished or not end_epoch - self.epochs <= epoch < end_epoch:
            self._start_pass(epoch)

    def rewind(self) -> None:
        """Go back to the beginning, as if nothing had been read."""
        self._start_pass(0)

    def start_next_pass(self) -> None:
        """Start the next pass if this one has ended, as iterating does.

        Call it before DataLoader workers copy the dataset.
        """
        if self._finished:
            self._start_pass(self._next_pass_epoch())

    def end_pass(self) -> dict:
        """End the pass after the packs trained so far, and return the state there.

        Only needed if workers read the packs: this process cannot see that they reached the end.
        """
        self._finished, self._read = True, self._trained or self._read
        return self.state_dict()

    def mark_trained(self, *packs: Pack | dict) -> None:
        """Mark packs as trained on: from now on the state refers to the trained packs.

        Without it, the state refers to the packs read, which includes prefetched ones. A stream's
        pack carries the cursor of its own shard only, so no pack may be omitted.
        """
        if self._read is self._start:
            self.start_next_pass()  # a finished pass was loaded: the workers started the next one
        if self._trained is None:
            self._trained = Progress(self._start.position, dict(self._start.cursors))
        for pack in packs:
            index, cursor = index_and_cursor(pack)
            shards = self.settings["shards"] or 1
            self._trained.check_next(index, cursor, self._share(), shards)
            self._trained.add(index, cursor)

    def count_until(self, state: dict) -> None:
        """Let the report of a stream count the packs up to a `state` of this pass.

        Loaders call it: they mark packs as trained ahead of the training, to know their states.
        """
        self._counted = state

    def state_after(self, *packs: Pack | dict) -> dict:
        """Mark packs as trained on, and return the state after them."""
        self.mark_trained(*packs)
        return self.state_dict()

    def state_dict(self) -> dict:
        """Return the state: small JSON from which any number of ranks and workers can continue.

        The pass ends once a pack was requested after its last one, or with `end_pass`; loading the
        state of a finished pass starts the next one. If DataLoader workers read the packs, this
        process knows only those passed to `mark_trained`; without that call the state stays at the
        beginning, and the state of a StatefulDataLoader has to be saved instead. If lengths are
        unknown, a rank knows only its own shards: `merge_states` merges the states of all ranks.
        """
        worker = self._worker_number()
        if worker is None:
            progress = self._trained or self._read
            # Reading may be ahead of training.
            finished = self._finished and progress.last == self._read.last
            shards = progress.shard_cursors(*self.ranks())
            return self._state(progress.next_position(self._share()), shards, finished)
        start = self._start.position
        _, epoch, epoch_start = self._read.last or (0, start.epoch, start.epoch_start)
        state = self._state(start, self._read.shard_cursors())
        fields = {"id": worker[0], "num_workers": worker[1], "num_packs": self._read.num_packs}
        return {**state, "worker": {**fields, "epoch": epoch, "epoch_start": epoch_start}}

    def load_state_dict(self, state: dict) -> None:
        """Continue from a state of the same data and settings.

        A finished pass is followed by the next one, unless the pass may be longer here:
        `max_packs` may differ and, if lengths are known, so may `epochs`, which then is the total
        of the pass; the empty packs that completed its last round are replaced by the packs that
        follow. The shards of a stream that have ended do not continue, so its `epochs` must be
        the same.
        """
        check_state(state, self.settings, self.fingerprint)
        position = self.reader.resume_position(state, self.epochs)
        worker = state.get("worker")
        if worker is not None and self._worker_number() != (worker["id"], worker["num_workers"]):
            raise ValueError(
                f"the state is of worker {worker['id']} of {worker['num_workers']}: keep "
                "num_workers, or save the state of the trained packs, which any number can continue"
            )
        cursors = {int(shard): dict(cursor) for shard, cursor in state.get("shards", {}).items()}
        self._start = Progress(position, cursors)
        self._read, self._worker = self._start, worker
        self._trained = self._counted = None
        self._finished = is_finished(state, self.epochs, self.max_packs)

    def _counted_cursors(self) -> dict[int, dict]:
        """Return the cursors of a stream's shards up to which its report counts."""
        if self._counted is None:
            return (self._trained or self._read).cursors
        shards = self._counted.get("shards", {})
        return {**self._start.cursors, **{int(shard): shards[shard] for shard in shards}}

    def _state(self, position: Position, shards: dict, finished: bool = False) -> dict:
        state = {
            "version": VERSION,
            "settings": dict(self.settings),
            "fingerprint": self.fingerprint,
            "epochs": self.epochs,
            "max_packs": self.max_packs,
            "finished": finished,
            "position": asdict(position),
        }
        return {**state, "shards": shards} if shards else state

    def _start_pass(self, epoch: int) -> None:
        end_epoch = None if self.epochs is None else epoch + self.epochs
        position, cursors = Position(epoch, 0, 0, end_epoch), {}
        if epoch and not isinstance(self.reader, PlannedPacks):
            last = self._read if self._finished else self._trained or self._read
            cursors = self.reader.initial_cursors(position, last.cursors)
        self._start = self._read = Progress(position, cursors)
        self._trained = self._counted = self._worker = None
        self._finished = False

    def _next_pass_epoch(self) -> int:
        """Return the first epoch of the next pass."""
        if self._start.position.end_epoch is not None:
            return self._start.position.end_epoch
        # `max_packs` ended a run without end, for each reader at its own last pack: all readers
        # must agree on one epoch. If shards end in different epochs, all know only the first.
        if isinstance(self.reader, PlannedPacks) and self.max_packs is not None:
            return self.reader.next_pass_epoch(self._read.next_position(self._share()))
        return self._start.position.epoch + 1
