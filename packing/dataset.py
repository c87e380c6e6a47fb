"""PackedDataset: any source to packs, as a torch dataset with a small, rank-free state.

    source ─▶ rows or tokens ─▶ order ─▶ packs ─▶ pack k to rank k mod world_size ─▶ its workers

The sequence of packs depends only on the data and the settings. Ranks, workers and restarts are
views of it; every rank sees the same number of packs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cached_property
from multiprocessing import parent_process
from multiprocessing.context import get_spawning_popen
from typing import Any, Literal

import numpy as np
import torch.distributed
from torch.utils.data import IterableDataset, get_worker_info

from ..runtime import Layout, find_layout, is_current, told_ranks
from .encoding.encoder import Encoder
from .encoding.report import SkippedRows
from .ordering.mixture import StoppingStrategy, parse_mixture
from .ordering.rank_shard import Position, RankShard
from .pack import Pack
from .pipeline import (
    PipelineOptions,
    build_packs,
    check_counts,
    check_rank,
    check_values,
    data_fingerprint,
    is_sequential,
    open_sources,
    state_settings,
)
from .planning.overflow import Overflow
from .planning.planner import Strategy, check_ints
from .readers.planned import PlannedPacks
from .readers.shard_reader import StreamSettings
from .state.progress import Progress, index_and_cursor
from .state.run_state import VERSION, check_state, is_finished


class PackedDataset(IterableDataset):
    """Packs of a source, for `DataLoader(dataset, batch_size=None)`.

    Iterating again gives the next epochs in another order. Through DataLoader workers it repeats
    the first order, because workers are new copies of a dataset that did not advance: call
    `set_epoch` before each pass, as trainers do, or use `nopad.trainer.PackedLoader`. Accelerate's
    `prepare`, which a stock HF Trainer calls too, would truncate the `cu_seq_lens` of a batch:
    use `PackedAccelerateLoader`, `PackedTrainer` or `PackedDataModule` of `nopad.trainer`.

    source: a path (jsonl, parquet, text, tokens, a saved dataset), a list, an iterable, a function
        that returns an iterator, a datasets.Dataset, or a list of (source, weight).
    epochs: epochs of one pass, or None for no end; max_packs: its length over all ranks.
    rank, world_size: of this process among those that train on packs of their own; ranks of one
        tensor- or sequence-parallel group have the same. Default: those of device_mesh, whose
        dimensions have names such as "dp", "sp", "tp"; or detected when iteration starts.
    shuffle: all rows if they have random access, otherwise blocks of 1024 or of this many rows.
    shards: number of parts of a stream with unknown lengths; ranks x workers must divide it.
    pretokenize: encode everything at once, so that lengths are known; default: small sources only.
    balance: give ranks that step together packs of similar cost; see `planning.balancing`.
    stopping_strategy: when the epoch of a mixture ends; see `ordering.mixture`.
    add_eos: end documents with the tokenizer's eos (True), with this id, or not (False).
    on_error: "raise" at a row that cannot be used, or "skip" and count it.

    >>> data = PackedDataset([[1, 2, 3], [4, 5], [6, 7, 8]], budget=6, shuffle=False)
    >>> [pack.tokens.tolist() for pack in data], data.count()
    ([[1, 2, 3, 6, 7, 8], [4, 5]], 2)
    """

    _sender: tuple[int, int, int] | None = None
    """Process id, rank and world size of the process that sent this copy to a spawned worker."""
    _layout: Layout | None = None
    """The layout of the run: a loader's (`_is_placed`), or detected when iteration starts."""
    _is_placed = False

    def __init__(
        self,
        source: Any,
        *,
        tokenizer: Any = None,
        budget: int,
        seed: int = 0,
        epochs: int | None = 1,
        max_packs: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        device_mesh: Any = None,
        shuffle: bool | int = True,
        shards: int | None = None,
        pool: int = 1024,
        strategy: Strategy = "best_fit",
        overflow: Overflow = "split",
        pad_to_multiple_of: int = 1,
        pad_token_id: int = 0,
        continue_positions: bool = False,
        balance: bool = False,
        stopping_strategy: StoppingStrategy = "first_exhausted",
        pretokenize: bool | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        text_column: str = "text",
        add_eos: bool | int = True,
        vocab_size: int | None = None,
        glob: str | None = None,
        dtype: str | None = None,
    ):
        """Open the source."""
        budget, pool, multiple, pad_token_id, seed = check_ints(
            budget=budget, pool=pool, pad_to_multiple_of=pad_to_multiple_of,
            pad_token_id=pad_token_id, seed=seed,
        )  # fmt: skip
        epochs, max_packs, shards, vocab_size = check_counts(
            epochs=epochs, max_packs=max_packs, shards=shards, vocab_size=vocab_size
        )
        self.rank, self.world_size = check_rank(*told_ranks(rank, world_size, device_mesh))
        pairs = parse_mixture(source) or [(source, 1)]
        weights = [weight for _, weight in pairs]
        packer = {"budget": budget, "pool": pool, "strategy": strategy, "overflow": overflow}
        packer |= {"pad_to_multiple_of": multiple, "pad_token_id": pad_token_id}
        packer |= {"continue_positions": continue_positions}
        encoder = Encoder(
            tokenizer, text_column=text_column, add_eos=add_eos, vocab_size=vocab_size
        )
        check_values(budget, pad_token_id, encoder.vocab_size, on_error, shuffle)
        options = PipelineOptions(
            packer=packer, encoder=encoder, seed=seed, shuffle=shuffle, shards=shards,
            pretokenize=pretokenize, stopping_strategy=stopping_strategy, balance=balance,
            max_packs=max_packs, skip_errors=on_error == "skip",
        )  # fmt: skip
        self.skipped = SkippedRows()
        opened = open_sources(pairs, encoder, glob=glob, dtype=dtype)
        self.reader = build_packs(opened, weights, options, self.skipped)
        self.settings = state_settings(self.reader, options, weights)
        self.epochs, self.max_packs = epochs, max_packs
        self._identify()
        self._start_pass(0)

    @cached_property
    def fingerprint(self) -> str:
        """Identify the data as it was opened, so that a state of other data is rejected.

        Iterables are identified at the first state: their rows are not read before they are needed.
        """
        return data_fingerprint(self.reader)

    def _identify(self) -> None:
        """Take the fingerprint at once: files may change before the first state."""
        if not is_sequential(self.reader):
            _ = self.fingerprint

    @property
    def stream_settings(self) -> StreamSettings | None:
        """Sources, encoder and packer of a stream; None if lengths are known."""
        return None if isinstance(self.reader, PlannedPacks) else self.reader.settings

    def __iter__(self) -> Iterator[Pack]:
        self._detect_layout()
        self.start_next_pass()
        share, start = self._share(), self._start
        progress = Progress(start.position, dict(start.cursors))
        position = start.position
        if self._worker is not None:
            progress.num_packs = self._worker["num_packs"]
            index = share.first(position.index) + progress.num_packs * share.stride
            position = replace(
                position,
                epoch=self._worker["epoch"],
                epoch_start=self._worker["epoch_start"],
                index=index,
            )
        self._read = progress
        for pack in self._read_packs(position, share, start.position.index, start.cursors):
            progress.add(pack.index, pack.cursor)
            yield pack
        self._finished = True

    def _read_packs(
        self, position: Position, share: RankShard, base: int, cursors: dict
    ) -> Iterator[Pack]:
        if isinstance(self.reader, PlannedPacks):
            return self.reader.read(position, share, base)
        return self.reader.read(position, share, base, cursors)

    def count(self, epoch: int = 0) -> int:
        """Count the packs of one epoch over all ranks; lengths must be known."""
        if not isinstance(self.reader, PlannedPacks):
            raise ValueError(
                "a stream's packs cannot be counted before it was read: encode it at once with "
                "pretokenize=True (an evaluation set needs that), or use estimate()"
            )
        return self.reader.count(epoch)

    def estimate(self) -> int | None:
        """Estimate the packs of one epoch; None for a stream of unknown size.

        A stream is estimated from its first rows and its size in bytes.
        """
        if isinstance(self.reader, PlannedPacks):
            return self.reader.count()
        return self.reader.estimate()

    @property
    def lengths(self) -> np.ndarray | None:
        """Tokens of every document; None for a stream, whose lengths are not known in advance."""
        return self.reader.store.lengths if isinstance(self.reader, PlannedPacks) else None

    def report(self, epoch: int | None = None) -> dict:
        """Report counts of samples packed, split, truncated, dropped and skipped, and shares.

        If lengths are known this is the plan of an epoch, by default the first of the current
        pass. For a stream it is what this process has read or, if workers read, the states that
        its trained packs carried; shares of weights that change are over all passes.
        """
        if isinstance(self.reader, PlannedPacks):
            epoch = self._start.position.epoch if epoch is None else epoch
            return self.reader.report(epoch, self.skipped)
        return self.reader.report((self._trained or self._read).cursors)

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
        info = get_worker_info()
        if info is None:
            progress = self._trained or self._read
            # Reading may be ahead of training.
            finished = self._finished and progress.last == self._read.last
            shards = progress.shard_cursors(*self.ranks())
            return self._state(progress.next_position(self._share()), shards, finished)
        start = self._start.position
        _, epoch, epoch_start = self._read.last or (0, start.epoch, start.epoch_start)
        state = self._state(start, self._read.shard_cursors())
        worker = {
            "id": info.id,
            "num_workers": info.num_workers,
            "num_packs": self._read.num_packs,
            "epoch": epoch,
            "epoch_start": epoch_start,
        }
        return {**state, "worker": worker}

    def load_state_dict(self, state: dict) -> None:
        """Continue from a state of the same data and settings.

        A finished pass is followed by the next one, unless the pass may be longer here:
        `max_packs` may differ and, if lengths are known, so may `epochs`, which then is the total
        of the pass; the empty packs that completed its last round are replaced by the packs that
        follow. A stream's last epoch ends with the packs of all pending samples, so its `epochs`
        must be the same.
        """
        check_state(state, self.settings, self.fingerprint)
        position = self.reader.resume_position(state, self.epochs)
        worker, info = state.get("worker"), get_worker_info()
        this_worker = None if info is None else (info.id, info.num_workers)
        if worker is not None and this_worker != (worker["id"], worker["num_workers"]):
            raise ValueError(
                f"the state is of worker {worker['id']} of {worker['num_workers']}: keep "
                "num_workers, or save the state of the trained packs, which any number can continue"
            )
        cursors = {int(shard): dict(cursor) for shard, cursor in state.get("shards", {}).items()}
        self._start = Progress(position, cursors)
        self._read, self._trained, self._worker = self._start, None, worker
        self._finished = is_finished(state, self.epochs, self.max_packs)

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
        self._trained: Progress | None = None
        self._worker: dict | None = None
        self._finished = False

    def __getstate__(self) -> dict:
        # A spawned worker is not a member of its parent's process group, so it is sent the rank.
        # Any other copy may end up in a process of another rank.
        if get_spawning_popen() is None:
            return {**self.__dict__, "_layout": None, "_is_placed": False}
        self._detect_layout()
        return {**self.__dict__, "_sender": (os.getpid(), *self.ranks())}

    def _next_pass_epoch(self) -> int:
        """Return the first epoch of the next pass."""
        if self._start.position.end_epoch is not None:
            return self._start.position.end_epoch
        # `max_packs` ended a run without end, for each reader at its own last pack: all readers
        # must agree on one epoch. If shards end in different epochs, all know only the first.
        if isinstance(self.reader, PlannedPacks) and self.max_packs is not None:
            return self.reader.next_pass_epoch(self._read.next_position(self._share()))
        return self._start.position.epoch + 1

    def _share(self) -> RankShard:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        return RankShard(*self.ranks(), worker, num_workers)

    def place(self, layout: Layout) -> None:
        """Read the packs of this process's replica, unless rank= was passed; loaders call it."""
        self._layout, self._is_placed = layout, True

    def _detect_layout(self) -> None:
        if self.rank is None and not (self._is_placed and is_current(self._layout)):
            self._layout, self._is_placed = find_layout(), False

    def ranks(self) -> tuple[int, int]:
        """Return the data-parallel rank and size of this process, or of this worker's parent."""
        if self.rank is not None and self.world_size is not None:
            return self.rank, self.world_size
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            if self._layout is not None and is_current(self._layout):
                return self._layout.data_rank, self._layout.data_size
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        parent = parent_process()
        if get_worker_info() is not None and parent is not None and self._sender is not None:
            process, rank, world_size = self._sender
            if process == parent.pid:  # otherwise it was sent to the parent, which forked
                return rank, world_size
        return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
