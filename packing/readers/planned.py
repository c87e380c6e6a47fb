"""Packs of documents with known lengths: every rank plans the full run and reads its share.

    lengths ─▶ seeded order ─▶ Planner ─▶ (Leveler) ─▶ plan of the epoch    the same everywhere
                                                          │ pack k to rank k mod world_size
                                                          ▼
                                                       tokens are gathered

The plan is made in blocks of documents, so memory does not grow with the epoch. A position is a few
integers; to resume, the epoch is planned again up to it, at a million documents a second or more.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import count

import numpy as np

from ..encoding.report import NO_PACKS, SkippedRows, add_counts, build_report
from ..images import check_uncut
from ..ordering.mixture import MixedOrder, Mixture, has_schedule
from ..ordering.permutation import epoch_order
from ..ordering.rank_share import Position, RankShare
from ..pack import Pack
from ..planning.balancing import Leveler, NoLeveling
from ..planning.overflow import kept_lengths, max_sample_length, too_long_error
from ..planning.planner import Counts, Plan, Planner
from ..planning.share_order import order_by_shares
from ..settings import PackSettings
from ..sources.remote import prefetch
from ..sources.token_store import TokenStore
from ..state.run_state import check_packs_left, end_epoch_of
from ..targets import cut_targets

GATHER_TOKENS = 1 << 17
"""Tokens gathered per call: enough to amortize the call, few enough to stay in the cache."""
PLANNED_POOL = 1 << 16
"""Documents whose packs are shuffled together, so that a set up to this size has no order."""
WINDOW_DOCUMENTS = 1 << 25
"""Documents planned together. They follow each other in the order of the whole epoch, so windows
change only which of them share a pack; larger windows would take longer to resume."""
MAX_READERS = 1 << 16
"""Largest number of ranks x workers. The position after a round of packs may be beyond the end of
the epoch in which the round started, by fewer packs than this."""


class PlannedPacks:
    """The sequence of packs of a token store, readable from any position by any share."""

    sequential_only = False

    def __init__(self, store: TokenStore, settings: PackSettings):
        store.check()
        self.store, self.settings = store, settings
        self.counts = Counts()
        """Counts of the epoch that was planned last."""
        self._num_packs: dict[int, int] = {}
        """The number of packs of each epoch that was counted."""
        self._max_length = max_sample_length(settings.packer)
        self._mixed_order = self._mix() if len(settings.weights) > 1 else None

    def _mix(self) -> MixedOrder:
        settings = self.settings
        mixture = Mixture(settings.weights, settings.stopping_strategy, budget=settings.budget)
        bounds, shuffle = self.store.source_bounds(len(settings.weights)), bool(settings.shuffle)
        return MixedOrder(bounds, self._kept_lengths, mixture, settings.seed, shuffle)

    def plans(self, epoch: int, max_documents: int | None = None) -> Iterator[Plan]:
        """Plan an epoch, or its first documents, block by block; the items are those documents."""
        counts, first_pack = Counts(), 0
        for window in range(self.num_windows):
            left = None if max_documents is None else max_documents - window * WINDOW_DOCUMENTS
            if left is not None and left <= 0:
                break
            for plan in self.window_plans(epoch, window, first_pack, left):
                first_pack += len(plan)
                yield plan
            counts = add_counts([counts, self.counts])
        self.counts = counts

    @property
    def num_windows(self) -> int:
        """Parts of an epoch that are planned independently, so that a resume plans one of them."""
        if self._mixed_order is not None:
            return 1
        return max(1, -(-len(self.store) // WINDOW_DOCUMENTS))

    def window_plans(
        self, epoch: int, window: int, first_pack: int = 0, max_documents: int | None = None
    ) -> Iterator[Plan]:
        """Plan a window of an epoch, or its first documents."""
        settings, options = self.settings, self.settings.planner
        if settings.shuffle:
            options["pool"] = max(PLANNED_POOL, options["pool"])
        planner, leveler = Planner(**options), NoLeveling()
        if settings.balance:
            leveler = Leveler(seed=settings.seed, epoch=epoch, first=first_pack)
        pending, first, changes = np.zeros(0, np.int64), 0, has_schedule(settings.weights)
        for documents in _first(self.document_order(epoch, window), max_documents):
            if changes:  # a block ends at the end of an interval at the latest
                yield leveler.feed(self._of_documents(planner.flush(), pending, first))
                yield leveler.finish()
            pending, lengths = np.concatenate([pending, documents]), self._lengths(documents)
            self._check_lengths(documents, lengths)
            yield leveler.feed(self._of_documents(planner.feed(lengths), pending, first))
            first_pending = max(first, planner.first_pending)
            pending, first = pending[first_pending - first :], first_pending
        yield leveler.feed(self._of_documents(planner.finish(), pending, first))
        yield leveler.finish()
        self.counts = planner.counts

    def _of_documents(self, plan: Plan, documents: np.ndarray, first: int) -> Plan:
        """Replace the items of a plan, positions in the order from `first`, by documents.

        If weights change, the packs are ordered by shares, unless balancing orders them by cost.
        """
        plan = Plan(documents[plan.items - first], plan.starts, plan.lengths, plan.offsets)
        weights = self.settings.weights
        if self.settings.balance or not has_schedule(weights):
            return plan
        sources = self.store.sources(plan.items)
        return order_by_shares(plan, sources, len(weights), self.settings.budget)

    def _lengths(self, documents: np.ndarray) -> np.ndarray:
        return self.store.lengths[documents].astype(np.int64, copy=False)

    def _check_lengths(self, documents: np.ndarray, lengths: np.ndarray) -> None:
        """Raise on a document that is too long, by name: the planner knows only its position."""
        if self._max_length is not None and len(lengths) and lengths.max() > self._max_length:
            first = int(np.argmax(lengths > self._max_length))
            location = self.store.location(int(documents[first]))
            raise too_long_error(location, int(lengths[first]), self._max_length)

    def document_order(self, epoch: int, window: int = 0) -> Iterator[np.ndarray]:
        if self._mixed_order is not None:
            return self._mixed_order.read(epoch)
        settings, n = self.settings, len(self.store)
        part = window * WINDOW_DOCUMENTS, min(n, (window + 1) * WINDOW_DOCUMENTS)
        return epoch_order(n, settings.seed, epoch, bool(settings.shuffle), positions=part)

    def _kept_lengths(self, documents: np.ndarray) -> np.ndarray:
        return kept_lengths(self._lengths(documents), self.settings.packer)

    def report(self, epoch: int, skipped: SkippedRows) -> dict:
        """Report an epoch from its plan, without reading tokens."""
        tokens, begun = np.zeros((2, len(self.settings.weights)), np.int64)
        for plan in self.plans(epoch):
            sources = self.store.sources(plan.items)
            np.add.at(tokens, sources, plan.lengths)
            np.add.at(begun, sources[plan.starts == 0], 1)
        report = build_report(self.counts, tokens.tolist(), skipped, self.settings.budget)
        documents = np.diff(self.store.source_bounds(len(self.settings.weights)))
        return {**report, "laps": (begun / np.maximum(1, documents)).tolist()}

    def count(self, epoch: int = 0) -> int:
        """Count the packs of an epoch, without reading tokens."""
        if epoch not in self._num_packs:
            self._num_packs[epoch] = sum(len(plan) for plan in self.plans(epoch))
        return self._num_packs[epoch]

    def estimate(self) -> int:
        """Count the packs of the first epoch: no estimate is needed."""
        return self.count()

    def next_pass_epoch(self, position: Position) -> int:
        """Return the first epoch that a pass of `max_packs` packs does not touch."""
        assert self.settings.max_packs is not None
        epoch, index = position.epoch, position.epoch_start
        while index < self.settings.max_packs:
            index += max(1, self.count(epoch))
            epoch += 1
        return epoch

    def resume_position(self, state: dict, epochs: int | None) -> Position:
        """Return where a pass of `epochs` epochs and `max_packs` packs continues from a state."""
        position = Position(**state["position"])
        if (state["epochs"], state["max_packs"]) == (epochs, self.settings.max_packs):
            return position
        # A position is after a round of the ranks; empty packs complete the last round of a pass.
        index = min(position.index, self._pass_end(position, state["max_packs"]))
        if state["max_packs"] != self.settings.max_packs:
            check_packs_left(index, self.settings.max_packs)
        return replace(position, index=index, end_epoch=end_epoch_of(state, epochs))

    def _pass_end(self, position: Position, max_packs: int | None) -> int:
        """Return the index after the last pack of a pass, or a later one if it is not known yet."""
        end = sys.maxsize if max_packs is None else max_packs
        if position.end_epoch is None:
            return end
        planned = position.epoch_start
        for epoch in range(position.epoch, position.end_epoch):
            planned += self.count(epoch)
            if not planned < position.index <= planned + MAX_READERS:
                return end  # more packs follow, or `read` refuses the position
        return min(end, planned)

    def fingerprint(self) -> str:
        """Identify the data of all sources."""
        return self.store.fingerprint()

    def read(
        self, position: Position, share: RankShare, base: int, cursors: Mapping | None = None
    ) -> Iterator[Pack]:
        """Yield the share's packs from `position` on, through the epochs before its `end_epoch`.

        Args:
            position: where to start.
            share: the packs of this rank and worker.
            base: the pack at which rounds of one pack per rank start, the same everywhere.
            cursors: not needed; a stream continues from them.
        """
        if position.window >= self.num_windows:
            raise ValueError(
                f"the state is in window {position.window}, there are "
                f"{self.num_windows}: it was not made by this run"
            )
        next_index, planned = share.next(base, position.index), position.planned_start
        epoch_start, starts = position.epoch_start, [_start(position)]
        end = sys.maxsize if self.settings.max_packs is None else self.settings.max_packs
        for epoch in count(position.epoch):
            if epoch == position.end_epoch or planned >= end:
                break
            resumed = epoch == position.epoch
            epoch_start = position.epoch_start if resumed else planned
            for window in range(position.window if resumed else 0, self.num_windows):
                starts.append(
                    _start(Position(epoch, epoch_start, window=window, window_start=planned))
                )
                for plan in self.window_plans(epoch, window, planned):
                    indices = np.arange(next_index, min(planned + len(plan), end), share.stride)
                    if len(indices):
                        packs = indices - planned
                        yield from self._gather(plan, packs, indices, starts, share, base)
                        next_index = int(indices[-1]) + share.stride
                    planned += len(plan)
                if planned >= end:
                    break
            if planned == epoch_start:
                raise ValueError(NO_PACKS)
            if resumed and position.index > planned + MAX_READERS:
                raise ValueError(
                    f"the state is at pack {position.index} of epoch {epoch}, which ends before "
                    f"pack {planned}: it was not made by this run"
                )
            starts = [start for start in starts if start[1]["epoch"] > epoch - share.world_size]
        while next_index < share.round_end(min(planned, end) - 1, base):
            cursor = _cursor_at(starts, share.round_start(next_index, base))
            yield Pack.of([], self.settings.budget, index=next_index, cursor=cursor)
            next_index += share.stride

    def _gather(self, plan: Plan, packs, indices, starts_at, share, base) -> Iterator[Pack]:
        """Gather some packs of a plan, several per call, and cut them into Packs."""
        packer, budget = self.settings.packer, self.settings.budget
        per_call = max(1, GATHER_TOKENS // budget)
        current_start, current = starts_at[-1]
        firsts = range(0, len(packs), per_call)
        gather = partial(
            self.store.gather,
            plan,
            pad_to_multiple_of=packer["pad_to_multiple_of"],
            pad_token_id=packer["pad_token_id"],
            vocab_size=self.settings.vocab_size,
        )
        calls = (partial(gather, packs[first : first + per_call]) for first in firsts)
        gathered = prefetch(calls) if self.store.is_remote else (call() for call in calls)
        for first, rows in zip(firsts, gathered, strict=True):
            tokens, labels, cu_seqlens, starts = *rows[:3], rows.starts
            has_labels = len(labels) > 0
            if not packer["continue_positions"]:
                starts = np.zeros_like(starts)
            samples = self.store.numbers_in_source(rows.documents)
            sources = self.store.sources(rows.documents)
            targets, images = (self.store.attached(name, rows) for name in ("targets", "images"))
            targets = cut_targets(targets, rows.starts, rows.lengths)
            check_uncut(images, rows.lengths)
            parent_counts = None
            if packer["overflow"] == "split":
                parent_counts = self.store.parent_label_counts(rows)
            pack_ends, segment_ends = rows.pack_ends.tolist(), rows.segment_ends.tolist()
            batch_indices = indices[first : first + per_call].tolist()
            starts_earlier = share.round_start(batch_indices[0], base) < current_start
            for p, index in enumerate(batch_indices):
                a, b, c, d = pack_ends[p], pack_ends[p + 1], segment_ends[p], segment_ends[p + 1]
                cursor = current
                if starts_earlier:
                    cursor = _cursor_at(starts_at, share.round_start(index, base))
                yield Pack(
                    tokens[a:b],
                    labels[a:b] if has_labels else None,
                    cu_seqlens[c + p : d + p + 1],
                    budget,
                    samples[c:d],
                    sources[c:d],
                    starts[c:d],
                    index,
                    cursor,
                    parent_counts if parent_counts is None else parent_counts[c:d],
                    targets if targets is None else targets[c:d],
                    images[c:d] or None,
                )


def _first(blocks: Iterator[np.ndarray], count: int | None) -> Iterator[np.ndarray]:
    """Yield the first `count` documents of an order; None: all."""
    for block in blocks:
        yield block[:count]
        if count is not None and (count := count - len(block)) <= 0:
            return


def _start(position: Position) -> tuple[int, dict]:
    """Return the pack at which a window starts, and the cursor of its packs."""
    skipped = ("index", "end_epoch")
    cursor = {name: value for name, value in position.to_json().items() if name not in skipped}
    return position.planned_start, cursor


def _cursor_at(starts: list[tuple[int, dict]], index: int) -> dict:
    """Return the cursor of the last window that does not start after a pack."""
    return next(cursor for start, cursor in reversed(starts) if start <= index)
