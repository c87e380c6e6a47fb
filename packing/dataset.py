"""PackedDataset: any source to packs, as a torch dataset whose state is small and rank-free.

    source ─▶ rows or tokens ─▶ order ─▶ packs ─▶ pack k to rank k mod world ─▶ its workers in turn

The sequence of packs is a function of the data and the settings alone. Ranks, workers and
restarts are views of it; every rank sees the same number of packs.
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

from .build import PipelineOptions, build, fingerprint_of, open_sources, state_settings
from .encoding.encoder import Encoder
from .encoding.report import SkippedRows
from .ordering.mixture import Stop, as_mixture
from .ordering.permutation import Position, Share
from .pack import Pack
from .planning.overflow import Overflow
from .planning.planner import Strategy, whole
from .readers.planned import PlannedPacks
from .state.progress import Progress, done
from .state.run_state import VERSION, check_state, is_over, pass_end


class PackedDataset(IterableDataset):
    """Packs of a source, for `DataLoader(dataset, batch_size=None)`.

    Iterating again gives the next epochs in another order. Through DataLoader workers it repeats
    the first order: they are copies, made anew for each pass, of a dataset that did not move on.
    Call `set_epoch` before each pass, as trainers do, or use `nopad.trainer.PackedLoader`.
    Accelerate's `prepare`, which a stock HF Trainer calls too, would cut `cu_seq_lens` off a batch:
    `PackedAccelerateLoader`, `PackedTrainer` and `PackedDataModule` of `nopad.trainer` take it whole.

    >>> data = PackedDataset([[1, 2, 3], [4, 5], [6, 7, 8]], budget=6, shuffle=False)
    >>> [pack.tokens.tolist() for pack in data], data.count()
    ([[1, 2, 3, 6, 7, 8], [4, 5]], 2)
    """

    _sender: tuple[int, int, int] | None = None
    """Process, rank and world of whom a worker that is not forked was sent from."""

    def __init__(
        self,
        source: Any,
        *,
        tokenizer: Any = None,
        budget: int,
        seed: int = 0,
        epochs: int | None = 1,
        packs: int | None = None,
        rank: int | None = None,
        world: int | None = None,
        shuffle: bool | int = True,
        shards: int | None = None,
        pool: int = 1024,
        strategy: Strategy = "best_fit",
        overflow: Overflow = "split",
        align: int = 1,
        pad: int = 0,
        continue_positions: bool = False,
        level: bool = False,
        stop: Stop = "first",
        ahead: bool | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        column: str = "text",
        eos: bool | int = True,
        vocab_size: int | None = None,
        glob: str | None = None,
        dtype: str | None = None,
    ):
        """Open the source.

        source: a path (jsonl, parquet, text, tokens, a saved dataset), a list, an iterable, a
            function that returns an iterator, a datasets.Dataset, or a list of (source, weight).
        epochs: passes over the data, or None for no end; packs: end after so many, over all ranks.
        rank, world: which of how many processes this is; else found out when iteration begins.
        shuffle: of everything where rows are known by number, else of windows of 1024 or so many.
        shards: into how many parts a stream of unknown lengths is cut; ranks x workers divide it.
        ahead: encode everything at once, so that lengths are known; default for what is small.
        stop: what ends an epoch of a mixture; see `mixture`.
        """
        budget, pool, align, pad = whole(budget=budget, pool=pool, align=align, pad=pad)
        epochs, packs, shards = _counts(epochs=epochs, packs=packs, shards=shards)
        (vocab_size,) = _counts(vocab_size=vocab_size)
        _check_share(rank, world)
        pairs = as_mixture(source) or [(source, 1)]
        weights = [weight for _, weight in pairs]
        packer = {"budget": budget, "pool": pool, "strategy": strategy, "overflow": overflow}
        packer |= {"align": align, "pad": pad, "continue_positions": continue_positions}
        encoder = Encoder(tokenizer, column=column, eos=eos, vocab_size=vocab_size)
        _check(budget, pad, encoder.vocab_size, on_error, shuffle)
        choices = PipelineOptions(
            packer=packer, encoder=encoder, seed=whole(seed=seed)[0], shuffle=shuffle,
            shards=shards, ahead=ahead, stop=stop, level=level, packs=packs, skip=on_error == "skip"
        )  # fmt: skip
        self.skipped = SkippedRows()
        opened = open_sources(pairs, encoder, glob=glob, dtype=dtype)
        self.packs = build(opened, weights, choices, self.skipped)
        self.settings = state_settings(self.packs, choices, weights)
        self.rank, self.world, self.epochs = rank, world, epochs
        self._begin_pass(0)

    @cached_property
    def data(self) -> str:
        """Identify the data by a fingerprint."""
        return fingerprint_of(self.packs)

    def __iter__(self) -> Iterator[Pack]:
        self.go_on()
        share, begin = self._share(), self._begin
        given = Progress(begin.position, dict(begin.cursors))
        position = begin.position
        if self._worker is not None:
            given.taken = self._worker["taken"]
            index = share.first(position.index) + given.taken * share.stride
            position = Position(self._worker["epoch"], self._worker["start"], index, position.until)
        self._given = given
        for pack in self._read(position, share, begin.position.index, begin.cursors):
            given.add(pack.index, pack.cursor)
            yield pack
        self._over = True

    def _read(self, position: Position, share: Share, base: int, cursors: dict) -> Iterator[Pack]:
        if isinstance(self.packs, PlannedPacks):
            return self.packs.read(position, share, base)
        return self.packs.read(position, share, base, cursors)

    def count(self, epoch: int = 0) -> int:
        """Count the packs of one epoch over all ranks; lengths must be known."""
        if not isinstance(self.packs, PlannedPacks):
            raise ValueError(
                "a stream's packs cannot be counted before it was read: encode it at once with "
                "ahead=True (a set to evaluate on needs that), or guess with estimate()"
            )
        return self.packs.count(epoch)

    def estimate(self) -> int | None:
        """Guess the packs of one epoch from a stream's first rows and size; None without a size."""
        if isinstance(self.packs, PlannedPacks):
            return self.packs.count()
        return self.packs.estimate()

    @property
    def lengths(self) -> np.ndarray | None:
        """Tokens of every document; None for a stream, where they are not known before reading."""
        return self.packs.store.lengths if isinstance(self.packs, PlannedPacks) else None

    def report(self, epoch: int | None = None) -> dict:
        """Say what was packed, split, truncated, dropped and left out, and the sources' shares.

        Where lengths are known this is the plan of an epoch, by default the one that the present
        pass began with. For a stream it is what this process has given out, or, where workers did,
        the states its stepped packs carried; shares of weights that change are over all passes.
        """
        if isinstance(self.packs, PlannedPacks):
            epoch = self._begin.position.epoch if epoch is None else epoch
            return self.packs.report(epoch, self.skipped)
        return self.packs.report((self._done or self._given).cursors)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, unless the pass that holds it is under way already.

        Trainers call it before every epoch, also after a resume, which it must not throw away.
        Without it, DataLoader workers give every pass in the order of the first. A dataset without
        end is left alone: it counts its epochs itself, over workers only if they are persistent.
        """
        until = self._begin.position.until
        if until is None or self.epochs is None:
            return
        if self._over or not until - self.epochs <= epoch < until:
            self._begin_pass(epoch)

    def rewind(self) -> None:
        """Go back to the very beginning, as if nothing had been read."""
        self._begin_pass(0)

    def go_on(self) -> None:
        """Begin the next pass if this one is over, as iterating does: before workers copy it."""
        if self._over:
            self._begin_pass(self._following_epoch())

    def end_pass(self) -> dict:
        """End the pass behind the packs stepped so far, and give the state there.

        What comes to the end by itself needs it not; through workers this process cannot know.
        """
        self._over, self._given = True, self._done or self._given
        return self.state_dict()

    def stepped(self, *packs: Pack | dict) -> None:
        """Say which packs were trained on: from now on the state is that of the stepped ones.

        Without it, the state is that of the packs given out, which counts prefetched ones too.
        A stream's packs carry their own shard's place only, so none of them may be left out.
        """
        if self._given is self._begin:
            self.go_on()  # a loaded pass was over: the workers that read these went on as well
        if self._done is None:
            self._done = Progress(self._begin.position, dict(self._begin.cursors))
        for pack in packs:
            index, cursor = done(pack)
            self._done.expect(index, cursor, self._share(), self.settings["shards"] or 1)
            self._done.add(index, cursor)

    def state_after(self, *packs: Pack | dict) -> dict:
        """Give the state after these packs were stepped as well."""
        self.stepped(*packs)
        return self.state_dict()

    def state_dict(self) -> dict:
        """Give the state: small JSON that any number of ranks and workers can continue from.

        Behind the last pack of a pass nothing is left of it. Once the pass was asked for more, or
        `end_pass` was called, it is over, and what continues from there is the next one.
        Of packs that a DataLoader's workers read, this process knows only what `stepped` told it;
        without that the state stays the beginning, and a StatefulDataLoader's own has to be saved.
        Where lengths are unknown a rank knows its own shards only: `merge_states` joins them.
        """
        info = get_worker_info()
        if info is None:
            progress = self._done or self._given
            over = self._over and progress.last == self._given.last  # what is read may be ahead
            shards = progress.shards(*self._ranks())
            return self._state(progress.reached(self._share()), shards, over)
        at = self._begin.position
        _, epoch, start = self._given.last or (0, at.epoch, at.start)
        worker = {"id": info.id, "of": info.num_workers, "taken": self._given.taken}
        state = self._state(self._begin.position, self._given.shards())
        return {**state, "worker": {**worker, "epoch": epoch, "start": start}}

    def load_state_dict(self, state: dict) -> None:
        """Continue where the state was taken; it must be of the same data and settings.

        A pass that was over is followed by the next, unless it may be longer here: `packs` may be
        another, and so may `epochs` where lengths are known, and the pass has so many in all. A
        stream's last epoch ends with packs of what was held back, so its `epochs` are the same.
        """
        check_state(state, self.settings, self.data)
        position = Position(**state["position"])
        if state["epochs"] != self.epochs:
            if not isinstance(self.packs, PlannedPacks):
                raise ValueError(
                    f"the state was made with epochs={state['epochs']}, this stream has "
                    f"epochs={self.epochs}: give both the same"
                )
            position = replace(position, until=pass_end(state, self.epochs))
        worker = state.get("worker")
        info = get_worker_info()
        here = None if info is None else (info.id, info.num_workers)
        if worker is not None and here != (worker["id"], worker["of"]):
            raise ValueError(
                f"the state is that of worker {worker['id']} of {worker['of']}: keep num_workers, "
                "or save the state of the packs that were stepped, which any number can continue"
            )
        cursors = {int(shard): dict(at) for shard, at in state.get("shards", {}).items()}
        self._begin = Progress(position, cursors)
        self._given, self._done, self._worker = self._begin, None, worker
        self._over = is_over(state, self.epochs, self.packs.packs)

    def _state(self, position: Position, shards: dict, over: bool = False) -> dict:
        state = {
            "version": VERSION,
            "settings": dict(self.settings),
            "data": self.data,
            "epochs": self.epochs,
            "packs": self.packs.packs,
            "over": over,
            "position": asdict(position),
        }
        return {**state, "shards": shards} if shards else state

    def _begin_pass(self, epoch: int) -> None:
        until = None if self.epochs is None else epoch + self.epochs
        position, cursors = Position(epoch, 0, 0, until), {}
        if epoch and not isinstance(self.packs, PlannedPacks):
            known = self._given if self._over else self._done or self._given
            cursors = self.packs.carried(position, known.cursors)
        self._begin = self._given = Progress(position, cursors)
        self._done: Progress | None = None
        self._worker: dict | None = None
        self._over = False

    def __getstate__(self) -> dict:
        # A worker that is not forked is no member of its parent's process group: it is sent the
        # rank. Any other copy may come to where the rank is another one.
        if get_spawning_popen() is None:
            return self.__dict__.copy()
        return {**self.__dict__, "_sender": (os.getpid(), *self._ranks())}

    def _following_epoch(self) -> int:
        """Give the epoch that the next pass begins with."""
        if self._begin.position.until is not None:
            return self._begin.position.until
        # A run without end was ended by `packs`, for each reader at a pack of its own: all must
        # name one epoch. Where shards end in different ones, only the pass's first is known to all.
        if isinstance(self.packs, PlannedPacks) and self.packs.packs is not None:
            return self.packs.following_epoch(self._given.reached(self._share()))
        return self._begin.position.epoch + 1

    def _share(self) -> Share:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return Share(*self._ranks(), worker, workers)

    def _ranks(self) -> tuple[int, int]:
        """Find out which of how many processes this one, or this worker's parent, is."""
        if self.rank is not None and self.world is not None:
            return self.rank, self.world
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        parent = parent_process()
        if get_worker_info() is not None and parent is not None and self._sender is not None:
            process, rank, world = self._sender
            if process == parent.pid:  # else it was sent to the parent, and forked from there
                return rank, world
        return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def _counts(**settings: int | None) -> list[int | None]:
    """Give settings that may be None, and else are at least 1."""
    for name, value in settings.items():
        if value is not None and whole(**{name: value})[0] < 1:
            raise ValueError(
                f"{name} {value}: at least 1, or None{' for no end' * (name == 'epochs')}"
            )
    return [None if value is None else int(value) for value in settings.values()]


def _check_share(rank: int | None, world: int | None) -> None:
    if (rank is None) != (world is None):
        raise ValueError(f"rank {rank} and world {world} go together: give both, or neither")


def _check(
    budget: int, pad: int, vocab_size: int | None, on_error: str, shuffle: bool | int
) -> None:
    if budget < 2:
        raise ValueError(f"budget {budget}: a pack needs at least 2 tokens to learn from")
    if pad < 0 or (vocab_size is not None and pad >= vocab_size):
        known = "from 0" if vocab_size is None else f"from 0 to {vocab_size - 1}"
        raise ValueError(f"pad={pad}: fill packs up with an id of the vocabulary, {known}")
    if on_error not in ("raise", "skip"):
        raise ValueError(f'on_error {on_error!r}: choose "raise" or "skip"')
    if not isinstance(shuffle, int | np.integer) or shuffle < 0:
        raise ValueError(f"shuffle={shuffle!r}: True, False, or how many rows to shuffle together")
