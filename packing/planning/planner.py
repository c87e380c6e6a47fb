"""`Planner`: a stream of lengths to a `Plan` of which items share a pack, in pure integers.

    feed(lengths) ─▶ too long? split, truncate, drop ─▶ segments ─▶ best_fit: windows ─▶ Plan
                                                                    sequential: next-fit
                                                                    concat: cut at the budget

The packs depend only on the settings and on the lengths in their order: not on how the lengths
were cut into calls, nor on how often the planner was saved and restored in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any, Literal

import numpy as np

from ..argument_checks import check_ints
from ..pack import MAX_BUDGET
from ..preparation_progress import announce_compilation
from ..state.int_codec import ints_from_text, ints_to_text
from .best_fit import MAX_DEFERRALS, fit_window, fit_windows
from .next_fit import cut_stream, next_fit
from .overflow import Overflow, cut_items, max_segment, pack_capacity, whole_items

Strategy = Literal["best_fit", "sequential", "concat"]
VERSION = 1
"""Incremented when the state changes, or when the same lengths give other packs."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """P packs of M segments; a segment is an item, or one part of a split item.

        items     [ 0 2 | 1 3 3 ]      segment 4 is the second part of item 3
        starts    [ 0 0 | 0 0 7 ]
        lengths   [ 5 3 | 2 7 1 ]
        offsets   [ 0     2       5 ]

    >>> plan = Plan(*map(np.array, ([0, 2, 1], [0, 0, 0], [5, 3, 6], [0, 2, 3])))
    >>> [pack.tolist() for pack in plan], plan.tokens.tolist(), plan.fill(budget=8)
    ([[0, 2], [1]], [8, 6], 0.875)
    """

    items: np.ndarray
    """int64 [M]: the item of each segment, numbered by arrival from 0."""
    starts: np.ndarray
    """int64 [M]: first token of the segment inside its item; 0 unless the item was split."""
    lengths: np.ndarray
    """int64 [M]: tokens of the segment."""
    offsets: np.ndarray
    """int64 [P+1]: pack p holds the segments offsets[p]:offsets[p+1]."""

    def __post_init__(self):
        assert len(self.items) == len(self.starts) == len(self.lengths) == self.offsets[-1]
        assert self.offsets[0] == 0

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[p] for p in range(len(self)))

    def __getitem__(self, pack: int) -> np.ndarray:
        """Return the items of one pack."""
        return self.items[self.segments(pack)]

    def segments(self, pack: int) -> slice:
        """Return the slice of one pack's segments in `items`, `starts` and `lengths`."""
        if not -len(self) <= pack < len(self):
            raise IndexError(f"pack {pack} of a plan of {len(self)}")
        pack %= len(self)
        return slice(int(self.offsets[pack]), int(self.offsets[pack + 1]))

    @property
    def tokens(self) -> np.ndarray:
        """int64 [P]: tokens in each pack."""
        return self.sum_per_pack(self.lengths)

    def fill(self, budget: int) -> float:
        """Return the fraction of all packs' budget that holds tokens."""
        return int(self.lengths.sum()) / (budget * len(self)) if len(self) else 0.0

    def sum_per_pack(self, values: np.ndarray) -> np.ndarray:
        """Sum `values`, one per segment, over each pack."""
        totals = np.concatenate([np.zeros(1, values.dtype), np.cumsum(values)])
        return totals[self.offsets[1:]] - totals[self.offsets[:-1]]

    def take(self, packs: np.ndarray) -> Plan:
        """Return the plan of these packs, in this order."""
        counts = np.diff(self.offsets)[packs]
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        segments = np.arange(offsets[-1]) + np.repeat(self.offsets[packs] - offsets[:-1], counts)
        return Plan(self.items[segments], self.starts[segments], self.lengths[segments], offsets)

    @classmethod
    def join(cls, plans: Sequence[Plan]) -> Plan:
        """Concatenate plans."""
        plans = [plan for plan in plans if len(plan)]
        if len(plans) < 2:
            return plans[0] if plans else cls(*(np.zeros(n, np.int64) for n in (0, 0, 0, 1)))
        ends = np.cumsum([0, *(plan.offsets[-1] for plan in plans)])
        shifted = [plan.offsets[1:] + end for plan, end in zip(plans, ends[:-1], strict=True)]
        return cls(
            np.concatenate([plan.items for plan in plans]),
            np.concatenate([plan.starts for plan in plans]),
            np.concatenate([plan.lengths for plan in plans]),
            np.concatenate([np.zeros(1, np.int64), *shifted]),
        )


@dataclass(slots=True)
class Counts:
    """Counters of a planner; tokens = packed + pending + truncated + dropped."""

    items: int = 0
    tokens: int = 0
    split: int = 0
    """Items split because they are too long."""
    truncated: int = 0
    """Items truncated."""
    truncated_tokens: int = 0
    dropped: int = 0
    """Items dropped."""
    dropped_tokens: int = 0
    packs: int = 0
    packed_tokens: int = 0
    sequences: int = 0
    """Samples and parts of split samples in the packs."""

    def as_list(self) -> list[int]:
        """Return the counters in their order: `Counts(*counts.as_list())` has the same."""
        return list(astuple(self))

    @property
    def pending_tokens(self) -> int:
        """Tokens of segments that have no pack yet."""
        return self.tokens - self.packed_tokens - self.truncated_tokens - self.dropped_tokens


class Planner:
    """Decides which items share a pack; fewer than `pool` segments are pending.

    An item is packed at the latest when 15 · `pool` more segments have arrived (see `best_fit.py`).

    Args:
        budget: tokens that a pack may hold.
        pool: segments that best_fit chooses from; a larger pool fills packs better.
        strategy: "best_fit" gives the fullest packs. "sequential" keeps the order, and a pack ends
            where the next item does not fit. "concat" keeps the order, and items are cut wherever a
            pack is full.
        overflow: what happens to an item longer than a pack; counted in `counts`.
        max_length: the longest sequence, if shorter than a pack; `overflow` applies to longer ones.
        pad_to_multiple_of: every segment occupies a multiple of this many tokens in its pack; the
            plan's lengths exclude the padding.

    >>> planner = Planner(budget=8, pool=4)
    >>> [pack.tolist() for pack in planner.feed(np.array([5, 6, 3, 2]))]
    [[0, 2], [1, 3]]
    """

    def __init__(
        self,
        budget: int,
        *,
        pool: int = 1024,
        strategy: Strategy = "best_fit",
        overflow: Overflow = "split",
        pad_to_multiple_of: int = 1,
        max_length: int | None = None,
    ):
        self.settings = planner_settings(
            budget=budget, pool=pool, strategy=strategy, overflow=overflow,
            pad_to_multiple_of=pad_to_multiple_of, max_length=max_length,
        )  # fmt: skip
        self.counts = Counts()
        self.capacity = pack_capacity(self.settings)
        """Tokens that a pack can hold."""
        self.max_segment = max_segment(self.settings)
        """Tokens that a segment can have."""
        self.cuts_stream = strategy == "concat" and self.max_segment == self.capacity
        """Whether items are cut wherever a pack is full: none of them is too long."""
        self.pending = np.zeros((3, 0), np.int64)
        """int64 [3, M]: item, start and length of each segment that has no pack yet."""
        self._deferrals = np.zeros(0, np.int64)

    def feed(self, lengths: np.ndarray) -> Plan:
        """Take the lengths of the next items; return the packs that are decided now.

        If an item is rejected, none of this call's items are taken.
        """
        lengths = _as_integers(lengths)
        first, shortest = self.counts.items, int(lengths.min(initial=1))
        if shortest < 1:
            item = first + int(np.argmin(lengths))
            raise ValueError(f"item {item} has length {shortest}: remove empty items")
        if lengths.max(initial=0) <= self.max_segment or self.cuts_stream:
            segments = whole_items(first, lengths)
        else:
            segments = cut_items(lengths, self.max_segment, self.settings["overflow"], self.counts)
        self.pending = np.concatenate([self.pending, segments], axis=1)
        self.counts.items += len(lengths)
        self.counts.tokens += int(lengths.sum())
        best_fits, pool = self.settings["strategy"] == "best_fit", self.settings["pool"]
        if best_fits and self.pending.shape[1] < pool:
            return Plan.join([])
        return self._decide()

    def flush(self) -> Plan:
        """Return the packs of the pending segments, except the emptiest, whose segments wait.

        Strategies that keep the order return none: their pending segments do not fill a pack.
        """
        return self._decide(flush=True)

    def finish(self) -> Plan:
        """Return the packs of all pending segments."""
        return self._decide(final=True)

    def _decide(self, *, flush: bool = False, final: bool = False) -> Plan:
        pending, multiple = self.pending, self.settings["pad_to_multiple_of"]
        if self.settings["strategy"] == "concat":
            pending = cut_stream(*pending, self.capacity, multiple)
        lengths = pending[2]
        sizes = lengths if multiple == 1 else -(-lengths // multiple) * multiple
        if self.settings["strategy"] == "best_fit":
            settings = self.counts.sequences, self.capacity, self.settings["pool"]
            with announce_compilation(fit_window, "the packer"):
                order, offsets, rest, self._deferrals = fit_windows(
                    sizes, self._deferrals, *settings, flush, final
                )
        else:
            offsets = next_fit(sizes, self.capacity, final)
            order, rest = np.split(np.arange(len(lengths)), offsets[-1:])
        self.pending = pending.take(rest, axis=1)
        items, starts, lengths = (column[order] for column in pending)
        plan = Plan(items, starts, lengths, offsets)
        self.counts.packs += len(plan)
        self.counts.packed_tokens += int(plan.lengths.sum())
        self.counts.sequences += len(plan.items)
        return plan

    @property
    def first_pending(self) -> int:
        """The first item that is pending at least in part; if none is, the next to arrive."""
        return int(self.pending[0].min(initial=self.counts.items))

    def state_dict(self) -> dict:
        """Return what a planner with the same settings needs to continue: small JSON, no tokens."""
        (items, starts, lengths), first = self.pending, self.first_pending
        return {
            "version": VERSION,
            "settings": dict(self.settings),
            "counts": asdict(self.counts),
            "first": first,
            "items": ints_to_text(items - first),
            "starts": ints_to_text(starts),
            "lengths": ints_to_text(lengths),
            "deferrals": ints_to_text(self._deferrals),
        }

    def load_state_dict(self, state: dict) -> None:
        """Continue from the state of another planner with the same settings."""
        if state.get("version") != VERSION:
            raise ValueError(
                f"the planner state has version {state.get('version')}, this nopad reads {VERSION}"
            )
        for name, value in self.settings.items():
            if state["settings"].get(name) != value:
                raise ValueError(
                    f"planner state has {name}={state['settings'].get(name)!r}, "
                    f"this planner {name}={value!r}: use the same for both"
                )
        items, starts, lengths, deferrals = (
            ints_from_text(state[name]) for name in ("items", "starts", "lengths", "deferrals")
        )
        counts = Counts(**state["counts"])
        pending = items + state["first"], starts, lengths
        if not self._is_valid(*pending, deferrals, counts):
            raise ValueError("the planner state contradicts itself: it was damaged or edited")
        self.pending, self._deferrals, self.counts = np.array(pending), deferrals, counts

    def _is_valid(self, items, starts, lengths, deferrals: np.ndarray, counts: Counts) -> bool:
        """Return whether a planner can be in this state; the compiled loops rely on it."""
        if not len(items) == len(starts) == len(lengths) >= len(deferrals):
            return False
        if len(items) == 0:
            return counts.pending_tokens == 0
        pool, best_fits = self.settings["pool"], self.settings["strategy"] == "best_fit"
        return bool(
            len(items) < (pool if best_fits else self.capacity)
            and items.max() < counts.items
            and 1 <= lengths.min() <= lengths.max() <= self.max_segment
            and lengths.sum() == counts.pending_tokens
            and 0 <= deferrals.min(initial=0) <= deferrals.max(initial=0) <= MAX_DEFERRALS
        )


def planner_settings(
    *, budget: int, pool: int, strategy: Strategy, overflow: Overflow, pad_to_multiple_of: int,
    max_length: int | None,
) -> dict[str, Any]:  # fmt: skip
    """Return the settings of a planner as JSON, or raise for one that is out of range."""
    if strategy not in ("best_fit", "sequential", "concat"):
        raise ValueError(f"strategy {strategy!r}: choose best_fit, sequential or concat")
    if overflow not in ("split", "truncate", "drop", "error"):
        raise ValueError(f"overflow {overflow!r}: choose split, truncate, drop or error")
    if strategy == "concat" and overflow != "split":
        raise ValueError(f'concat always splits: overflow {overflow!r} must be "split"')
    budget, pool, multiple = check_ints(
        budget=budget, pool=pool, pad_to_multiple_of=pad_to_multiple_of
    )
    if not 1 <= budget <= MAX_BUDGET:
        allowed = "at most" if budget > 0 else "1 to"
        raise ValueError(f"budget {budget}: a pack has {allowed} {MAX_BUDGET} tokens")
    if multiple < 1 or budget < multiple:
        raise ValueError(
            f"pad_to_multiple_of {multiple} must be at least 1 and at most the budget {budget}"
        )
    if pool < 1:
        raise ValueError(f"pool={pool}: pass at least 1")
    if max_length is not None:
        (max_length,) = check_ints(max_length=max_length)
        if max_length < 2:
            raise ValueError(f"max_length {max_length}: a sequence needs 2 tokens to learn from")
    return {
        "budget": budget,
        "pool": pool,
        "strategy": strategy,
        "overflow": overflow,
        "pad_to_multiple_of": multiple,
        "max_length": max_length,
    }


def _as_integers(lengths: np.ndarray) -> np.ndarray:
    lengths = np.asarray(lengths)
    if lengths.ndim != 1 or (len(lengths) and lengths.dtype.kind not in "iu"):
        raise ValueError(f"lengths must be one row of integers, got {lengths.dtype}{lengths.shape}")
    return lengths.astype(np.int64, copy=False)
