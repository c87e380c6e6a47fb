"""Packs of documents whose lengths are known: every rank plans everything, and reads its share.

    lengths ─▶ seeded order ─▶ Planner ─▶ (Leveler) ─▶ plan of the epoch    the same everywhere
                                                          │ pack k to rank k mod world
                                                          ▼
                                                       tokens are read and laid out

The plan is made in windows of documents, so memory does not grow with the epoch. A position is
a few integers; to continue, the epoch is planned again up to it, at tens of millions of documents
a second.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np

from ..encoding.report import NOTHING, SkippedRows, report
from ..ordering.epoch_order import MixedOrder, epoch_order
from ..ordering.mixture import Stop, Weight, changing
from ..ordering.permutation import Position, Share
from ..pack import Pack
from ..planning.leveling import Leveler
from ..planning.overflow import Counts, limit, too_long
from ..planning.plan import Plan
from ..planning.planner import Planner
from ..sources.token_store import TokenStore

TOGETHER = 1 << 17
"""Tokens laid out by one call: enough to hide the call, few enough to stay in the cache."""


class PlannedPacks:
    """The sequence of packs of a token store, readable from any position by any share."""

    def __init__(
        self,
        store: TokenStore,
        planner: dict[str, Any],
        *,
        seed: int = 0,
        shuffle: bool = True,
        weights: Sequence[Weight] = (1,),
        stop: Stop = "first",
        level: bool = False,
        vocab_size: int | None = None,
        continue_positions: bool = False,
        pad: int = 0,
        packs: int | None = None,
    ):
        store.check()
        self.counts = Counts()
        """Of the epoch that was planned last."""
        self.vocab_size = vocab_size
        self.stop: Stop = stop
        self.store, self.planner = store, planner
        self._splits = planner.get("overflow", "split") == "split"
        self._longest = limit({"overflow": "split", "align": 1, **planner})
        self.seed, self.shuffle, self.level = seed, shuffle, level
        self.weights = weights
        self._drawn = 0, np.zeros(len(weights), np.int64)
        """An epoch, and the tokens of each source before it: those counted last."""
        self.continue_positions, self.pad, self.packs = continue_positions, pad, packs

    def plans(self, epoch: int, first_pack: int = 0) -> Iterator[Plan]:
        """Plan an epoch window by window; the items are the documents of the store."""
        planner = Planner(**self.planner)
        leveller = Leveler(seed=self.seed, first=first_pack) if self.level else NoLeveling()
        named, first = np.zeros(0, np.int64), 0
        for documents in self._order(epoch):
            named = np.concatenate([named, documents])
            lengths = self.store.lengths[documents]
            self._check_lengths(documents, lengths)
            plan = planner.feed(lengths)
            yield leveller.feed(_renamed(plan, named, first))
            needed = max(first, planner.first_held)
            named, first = named[needed - first :], needed
        yield leveller.feed(_renamed(planner.finish(), named, first))
        yield leveller.finish()
        self.counts = planner.counts

    def _check_lengths(self, documents: np.ndarray, lengths: np.ndarray) -> None:
        """Refuse what is too long by its own number, since the planner knows only its place."""
        if self._longest is not None and len(lengths) and lengths.max() > self._longest:
            worst = int(np.argmax(lengths > self._longest))
            where = self.store.place(int(documents[worst]))
            raise too_long(where, int(lengths[worst]), self._longest)

    def _order(self, epoch: int) -> Iterator[np.ndarray]:
        if len(self.weights) == 1:
            return epoch_order(len(self.store), self.seed, epoch, self.shuffle)
        return self._mixed().epoch(epoch, self._drawn_before(epoch))

    def _mixed(self) -> MixedOrder:
        firsts, lengths = self.store.source_bounds(len(self.weights)), self.store.lengths
        return MixedOrder(firsts, lengths, self.weights, self.stop, self.seed, self.shuffle)

    def _drawn_before(self, epoch: int) -> np.ndarray:
        """Count the tokens of each source in the epochs before, where weights follow them."""
        if not changing(self.weights):
            return np.zeros(len(self.weights), np.int64)
        known, drawn = self._drawn[0], self._drawn[1].copy()
        if known > epoch:
            known, drawn = 0, np.zeros_like(drawn)
        for earlier in range(known, epoch):
            for documents in self._mixed().epoch(earlier, drawn.copy()):
                np.add.at(drawn, self.store.sources(documents), self.store.lengths[documents])
        self._drawn = epoch, drawn
        return drawn

    def report(self, epoch: int, skipped: SkippedRows) -> dict:
        """Account for an epoch by its plan, without reading a token."""
        drawn = np.zeros(len(self.weights), np.int64)
        for plan in self.plans(epoch):
            np.add.at(drawn, self.store.sources(plan.items), plan.lengths)
        return report(self.counts, drawn.tolist(), skipped, self.planner["budget"])

    def count(self, epoch: int = 0) -> int:
        """Count the packs of an epoch, without reading a token."""
        return sum(len(plan) for plan in self.plans(epoch))

    def following_epoch(self, position: Position) -> int:
        """Give the first epoch that a pass which `packs` ends leaves untouched."""
        assert self.packs is not None
        epoch, at = position.epoch, position.start
        while at < self.packs:
            at += max(1, self.count(epoch))
            epoch += 1
        return epoch

    def read(self, position: Position, share: Share, base: int) -> Iterator[Pack]:
        """Give the share's packs from `position` on, through the epochs before its `until`.

        base: the pack from which rounds of one pack per rank are counted, the same everywhere.
        """
        following, at = share.next(base, position.index), position.start
        begins = [(position.epoch, position.start)]
        last = sys.maxsize if self.packs is None else self.packs
        for epoch in count(position.epoch):
            if epoch == position.until or at >= last:
                break
            begins.append((epoch, at))
            for plan in self.plans(epoch, at):
                mine = np.arange(following, min(at + len(plan), last), share.stride)
                if len(mine):
                    yield from self._packs(plan, mine - at, mine, begins, share, base)
                    following = int(mine[-1]) + share.stride
                at += len(plan)
            if at == begins[-1][1]:
                raise ValueError(NOTHING)
            begins = [begin for begin in begins if begin[0] > epoch - share.world]
        while following < share.round_end(min(at, last) - 1, base):
            cursor = _cursor(begins, share.round_start(following, base))
            yield Pack.of([], self.planner["budget"], index=following, cursor=cursor)
            following += share.stride

    def _packs(self, plan: Plan, numbers, indices, begins, share, base) -> Iterator[Pack]:
        """Lay out some packs of a plan, several at a time, and cut them apart."""
        budget, align = self.planner["budget"], self.planner.get("align", 1)
        together = max(1, TOGETHER // budget)
        current = {"epoch": begins[-1][0], "start": begins[-1][1]}
        for first in range(0, len(numbers), together):
            some = numbers[first : first + together]
            rows = self.store.lay(plan, some, align, self.pad, self.vocab_size)
            tokens, labels, bounds, starts = rows.tokens, rows.labels, rows.bounds, rows.starts
            marked = len(labels) > 0
            if not self.continue_positions:
                starts = np.zeros_like(starts)
            shown, sources = self.store.numbers(rows.documents), self.store.sources(rows.documents)
            wholes = self.store.wholes(rows) if self._splits else None
            ends, cuts = rows.ends.tolist(), rows.cuts.tolist()
            places = indices[first : first + together].tolist()
            early = share.round_start(places[0], base) < current["start"]
            for p, index in enumerate(places):
                a, b, c, d = ends[p], ends[p + 1], cuts[p], cuts[p + 1]
                cursor = _cursor(begins, share.round_start(index, base)) if early else current
                yield Pack(
                    tokens[a:b],
                    labels[a:b] if marked else None,
                    bounds[c + p : d + p + 1],
                    budget,
                    shown[c:d],
                    sources[c:d],
                    starts[c:d],
                    index,
                    cursor,
                    wholes if wholes is None else wholes[c:d],
                )


class NoLeveling:
    """Leaves packs as they were planned."""

    def feed(self, plan: Plan) -> Plan:
        """Give the packs back."""
        return plan

    def finish(self) -> Plan:
        """Nothing was kept."""
        return Plan.join([])


def _renamed(plan: Plan, named: np.ndarray, first: int) -> Plan:
    """Name the documents of a plan instead of their places in the order."""
    return Plan(named[plan.items - first], plan.starts, plan.lengths, plan.offsets)


def _cursor(begins: list[tuple[int, int]], index: int) -> dict:
    """Name the last epoch that began at or before a pack."""
    epoch, start = next(begin for begin in reversed(begins) if begin[1] <= index)
    return {"epoch": epoch, "start": start}
