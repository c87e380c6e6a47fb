"""Packs of documents whose lengths are known: every rank plans everything, and reads its share.

    lengths ─▶ seeded order ─▶ Planner ─▶ (Leveller) ─▶ plan of the epoch    the same everywhere
                                                          │ pack k to rank k mod world
                                                          ▼
                                                       tokens are read and laid out

The plan is made in windows of documents, so memory does not grow with the epoch. A position is
a few integers; to continue, the epoch is planned again up to it, at tens of millions of documents
a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from .order import Share, key, shuffled
from .pack import Pack
from .plan import Plan
from .planner import Planner
from .token_store import TokenStore

WINDOW = 1 << 16
"""Documents planned at a time."""
TOGETHER = 1 << 17
"""Tokens laid out by one call: enough to hide the call, few enough to stay in the cache."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a pass stands: packs below `index` are done; `epoch` began with pack `start`."""

    epoch: int = 0
    start: int = 0
    index: int = 0
    until: int | None = None
    """The epoch before which the pass ends; None: it never does."""


class PlannedPacks:
    """The sequence of packs of a token store, readable from any position by any share."""

    def __init__(
        self,
        store: TokenStore,
        planner: dict[str, Any],
        *,
        seed: int = 0,
        shuffle: bool = True,
        continue_positions: bool = False,
        pad: int = 0,
    ):
        self.store, self.planner = store, planner
        self.seed, self.shuffle = seed, shuffle
        self.continue_positions, self.pad = continue_positions, pad

    def plans(self, epoch: int) -> Iterator[tuple[Plan, np.ndarray]]:
        """Plan an epoch window by window; beside each plan, the document of every segment."""
        planner = Planner(**self.planner)
        for begin in range(0, len(self.store), WINDOW):
            places = np.arange(begin, min(begin + WINDOW, len(self.store)))
            documents = self._documents(places, epoch)
            plan = self._mixed(planner.feed(self.store.lengths[documents]), epoch, begin)
            older = plan.items < begin
            named = documents[np.maximum(plan.items - begin, 0)]
            named[older] = self._documents(plan.items[older], epoch)
            yield plan, named
        plan = self._mixed(planner.finish(), epoch, len(self.store))
        yield plan, self._documents(plan.items, epoch)

    def _mixed(self, plan: Plan, epoch: int, begin: int) -> Plan:
        """Shuffle a window's packs, or the parts of one long document would follow each other."""
        if not self.shuffle:
            return plan
        order_key = key("packs", self.seed, epoch, begin)
        return plan.take(shuffled(np.arange(len(plan)), len(plan), order_key))

    def _documents(self, places: np.ndarray, epoch: int) -> np.ndarray:
        """Give the documents that stand at these places of an epoch."""
        if not self.shuffle:
            return places
        return shuffled(places, len(self.store), key("epoch", self.seed, epoch))

    def count(self, epoch: int = 0) -> int:
        """Count the packs of an epoch, without reading a token."""
        return sum(len(plan) for plan, _ in self.plans(epoch))

    def read(self, position: Position, share: Share, base: int) -> Iterator[Pack]:
        """Give the share's packs from `position` on, through the epochs before its `until`.

        base: the pack from which rounds of one pack per rank are counted, the same everywhere.
        """
        following, at = share.next(base, position.index), position.start
        begins = [(position.epoch, position.start)]
        for epoch in count(position.epoch):
            if epoch == position.until:
                break
            begins.append((epoch, at))
            for plan, documents in self.plans(epoch):
                mine = np.arange(following, at + len(plan), share.stride)
                if len(mine):
                    yield from self._packs(plan, documents, mine - at, mine, begins, share, base)
                    following = int(mine[-1]) + share.stride
                at += len(plan)
            if at == begins[-1][1]:
                raise ValueError("there is nothing to pack: the data is empty, or all was dropped")
            begins = [begin for begin in begins if begin[0] > epoch - share.world]
        while following < share.round_end(at - 1, base):
            cursor = _cursor(begins, share.round_start(following, base))
            yield Pack.of([], self.planner["budget"], index=following, cursor=cursor)
            following += share.stride

    def _packs(self, plan: Plan, documents, numbers, indices, begins, share, base):
        """Lay out some packs of a plan, several at a time, and cut them apart."""
        budget, align = self.planner["budget"], self.planner.get("align", 1)
        together = max(1, TOGETHER // budget)
        current = {"epoch": begins[-1][0], "start": begins[-1][1]}
        for first in range(0, len(numbers), together):
            segments, offsets = _segments(plan, numbers[first : first + together])
            starts, named = plan.starts[segments], documents[segments]
            lengths = plan.lengths[segments]
            rows = self.store.lay(named, starts, lengths, offsets, align, self.pad)
            sources, shown = self.store.sources(named), self.store.numbers(named)
            if not self.continue_positions:
                starts = np.zeros_like(starts)
            ends, cuts = rows.ends.tolist(), offsets.tolist()
            for p, index in enumerate(indices[first : first + together].tolist()):
                a, b, c, d = ends[p], ends[p + 1], cuts[p], cuts[p + 1]
                begin = share.round_start(index, base)
                yield Pack(
                    rows.tokens[a:b],
                    rows.labels[a:b],
                    rows.bounds[c + p : d + p + 1],
                    budget,
                    shown[c:d],
                    sources[c:d],
                    starts[c:d],
                    index,
                    current if begin >= current["start"] else _cursor(begins, begin),
                )


def _cursor(begins: list[tuple[int, int]], index: int) -> dict:
    """Name the last epoch that began at or before a pack."""
    epoch, start = next(begin for begin in reversed(begins) if begin[1] <= index)
    return {"epoch": epoch, "start": start}


def _segments(plan: Plan, packs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Give the segments of some packs, and where each pack's begin among them."""
    counts = plan.offsets[packs + 1] - plan.offsets[packs]
    offsets = np.zeros(len(packs) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return np.arange(offsets[-1]) + np.repeat(plan.offsets[packs] - offsets[:-1], counts), offsets
