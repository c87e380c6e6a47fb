"""PackedDataset: any source to packs, as a torch dataset whose state is small and rank-free.

    source ─▶ rows or tokens ─▶ order ─▶ packs ─▶ pack k to rank k mod world ─▶ its workers in turn

The sequence of packs is a function of the data and the settings alone. Ranks, workers and
restarts are views of it; every rank sees the same number of packs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Literal

import torch.distributed
from torch.utils.data import IterableDataset, get_worker_info

from .ahead import Skipped, encode_ahead
from .encoder import Encoder
from .fingerprint import tokenizer_fingerprint
from .order import Share
from .overflow import Overflow
from .pack import Pack
from .planned import PlannedPacks, Position
from .planner import Strategy
from .sources import RowSource, open_source
from .state import VERSION, check_state
from .token_store import TokenStore


class PackedDataset(IterableDataset):
    """Packs of a source, for `DataLoader(dataset, batch_size=None)`.

    >>> data = PackedDataset([[1, 2, 3], [4, 5], [6, 7, 8]], budget=6, shuffle=False)
    >>> [pack.tokens.tolist() for pack in data], data.count()
    ([[1, 2, 3, 6, 7, 8], [4, 5]], 2)
    """

    def __init__(
        self,
        source: Any,
        *,
        tokenizer: Any = None,
        budget: int,
        seed: int = 0,
        epochs: int | None = 1,
        rank: int | None = None,
        world: int | None = None,
        pool: int = 1024,
        strategy: Strategy = "best_fit",
        overflow: Overflow = "split",
        align: int = 1,
        continue_positions: bool = False,
        shuffle: bool | int = True,
        on_error: Literal["raise", "skip"] = "raise",
        column: str = "text",
        eos: bool | int = True,
        vocab_size: int | None = None,
        glob: str | None = None,
        dtype: str | None = None,
    ):
        """Open the source; small ones are encoded at once.

        source: a path, a list, an iterable, a function that returns an iterator or a dataset.
        epochs: passes over the data, or None for no end.
        rank, world: which of how many processes this is; else found out when iteration begins.
        """
        if on_error not in ("raise", "skip"):
            raise ValueError(f'on_error {on_error!r}: choose "raise" or "skip"')
        if epochs is not None and epochs < 1:
            raise ValueError(f"epochs {epochs}: at least 1, or None for no end")
        self.encoder = Encoder(tokenizer, column=column, eos=eos, vocab_size=vocab_size)
        self.skipped = Skipped() if on_error == "skip" else None
        opened = open_source(source, column=column, glob=glob, dtype=dtype, eos=self.encoder.eos)
        self.source = opened
        planner = {"budget": budget, "pool": pool, "strategy": strategy}
        planner |= {"overflow": overflow, "align": align}
        if isinstance(opened, RowSource):
            opened = [encode_ahead(opened, self.encoder, self.skipped)]
        self.packs = PlannedPacks(
            TokenStore(opened),
            planner,
            seed=seed,
            shuffle=bool(shuffle),
            continue_positions=continue_positions,
        )
        self.settings = {
            **planner,
            "seed": seed,
            "shuffle": bool(shuffle),
            "continue_positions": continue_positions,
            "tokenizer": tokenizer_fingerprint(tokenizer),
        }
        self.data = self.packs.store.fingerprint()
        self.rank, self.world, self.epochs = rank, world, epochs
        self._position = Position(until=epochs)
        self._last: Pack | None = None
        self._taken = 0
        self._resumed: dict | None = None

    def __iter__(self) -> Iterator[Pack]:
        share = self._share()
        base, position = self._position.index, self._position
        self._taken, resumed = 0, self._resumed
        if resumed is not None:
            self._taken = resumed["taken"]
            index = share.first(base) + self._taken * share.stride
            position = Position(resumed["epoch"], resumed["start"], index, position.until)
        for pack in self.packs.read(position, share, base):
            self._last, self._taken = pack, self._taken + 1
            yield pack
        self._next_pass()

    def count(self, epoch: int = 0) -> int:
        """Count the packs of one epoch over all ranks."""
        return self.packs.count(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, unless the run stands in it already."""
        if self._position.epoch != epoch:
            self._begin_pass(epoch)

    def state_dict(self) -> dict:
        """Give the state after the last pack that this process was given."""
        if get_worker_info() is None:
            return (
                self._state(self._position) if self._last is None else self.state_after(self._last)
            )
        info, last = get_worker_info(), self._last
        at = {"epoch": self._position.epoch, "start": self._position.start}
        worker = {"id": info.id, "of": info.num_workers, "taken": self._taken}
        return self._state(self._position, worker={**worker, **(last.cursor if last else at)})

    def state_after(self, pack: Pack) -> dict:
        """Give the state after a pack was stepped, on this rank and, in its round, on the others.

        Use it where packs are prefetched: the state is then that of the pack you have trained on,
        whoever else has read ahead.
        """
        index = self._share().round_end(pack.index, self._position.index)
        position = Position(pack.cursor["epoch"], pack.cursor["start"], index)
        return self._state(position)

    def load_state_dict(self, state: dict) -> None:
        """Continue where the state was taken; it must be of the same data and settings."""
        check_state(state, self.settings, self.data)
        self._position, self._last, self._resumed = Position(**state["position"]), None, None
        if "worker" in state:
            info = get_worker_info()
            here = None if info is None else (info.id, info.num_workers)
            if here != (state["worker"]["id"], state["worker"]["of"]):
                raise ValueError(
                    f"the state is of worker {state['worker']['id']} of {state['worker']['of']}, "
                    "and belongs to that worker: keep num_workers, or use state_after(pack)"
                )
            self._resumed = state["worker"]

    def _state(self, position: Position, **extra: Any) -> dict:
        at = {**asdict(position), "until": self._position.until}
        return {
            "version": VERSION,
            "settings": dict(self.settings),
            "data": self.data,
            "position": at,
            **extra,
        }

    def _next_pass(self) -> None:
        self._begin_pass(self._position.until or 0)

    def _begin_pass(self, epoch: int) -> None:
        until = None if self.epochs is None else epoch + self.epochs
        self._position, self._last, self._resumed = Position(epoch, 0, 0, until), None, None

    def _share(self) -> Share:
        info = get_worker_info()
        rank, world = self.rank, self.world
        if (
            world is None
            and torch.distributed.is_available()
            and torch.distributed.is_initialized()
        ):
            rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        elif world is None:
            rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return Share(rank or 0, world, worker, workers)
