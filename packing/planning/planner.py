"""The planner: lengths in, packs out, in a stream and in pure integers.

    feed(lengths) ─▶ too long? split, truncate, drop ─▶ segments ─▶ best fit over a pool ─▶ Plan
                                                                    next-fit in order
                                                                    cut at the budget

The packs are a function of the settings and of the lengths in their order: not of how the
lengths were cut into calls, nor of how often the planner was saved and restored on the way.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Literal

import numpy as np

from ..jit import jit
from ..state.int_codec import from_text, to_text
from .best_fit import LAPS, PATIENCE, best_fit
from .next_fit import cut_stream, next_fit
from .overflow import Counts, Overflow, cut
from .plan import Plan
from .segments import Segments

Strategy = Literal["best_fit", "sequential", "concat"]
VERSION = 2
"""Grows whenever the same lengths would give other packs: a state continues only under its own."""


class Planner:
    """Decides which items share a pack, holding back fewer than `pool` segments.

    An item leaves at the latest when 61 · `pool` more segments have arrived (see `best_fit`: 15
    rounds of at most 4 · `pool` arrivals, and fewer than `pool` that were not looked at yet).

    strategy  best_fit: fullest packs; sequential: order kept, a pack ends where the next item
              does not fit; concat: order kept, items cut wherever a pack is full.
    overflow  what becomes of an item longer than a pack; it is counted in `counts`.
    align     every segment takes a multiple of this many places in its pack; the plan's lengths
              stay the true ones.

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
        align: int = 1,
    ):
        if strategy not in ("best_fit", "sequential", "concat"):
            raise ValueError(f"strategy {strategy!r}: choose best_fit, sequential or concat")
        if overflow not in ("split", "truncate", "drop", "error"):
            raise ValueError(f"overflow {overflow!r}: choose split, truncate, drop or error")
        if strategy == "concat" and overflow != "split":
            raise ValueError(f'concat splits by nature: overflow {overflow!r} must be "split"')
        budget, pool, align = whole(budget=budget, pool=pool, align=align)
        if align < 1 or budget < align:
            raise ValueError(f"align {align} must be at least 1 and at most the budget {budget}")
        if pool < 1:
            raise ValueError(f"pool {pool}: hold at least one segment")
        self.settings = {
            "budget": budget,
            "pool": pool,
            "strategy": strategy,
            "overflow": overflow,
            "align": align,
        }
        self.counts = Counts()
        self.room = budget // align * align
        """Places a pack has, in whole multiples of `align`."""
        self.held = Segments.none()
        """What waits for its pack."""
        self._waits, self._since = np.zeros(0, np.int64), 0

    def feed(self, lengths: np.ndarray) -> Plan:
        """Take the lengths of the next items; give the packs that are decided now.

        Where an item is refused, none of this call's items were taken.
        """
        lengths = _integers(lengths)
        least, most, total = _measure(lengths)
        if least < 1:
            where = self.counts.items + int(np.argmin(lengths))
            raise ValueError(f"item {where} has length {least}: leave empty items out")
        if most <= self.room or self.settings["strategy"] == "concat":
            self.held = self.held.followed_by_items(self.counts.items, lengths)
        else:
            segments = cut(lengths, self.room, self.settings["overflow"], self.counts)
            self.held = self.held.followed_by(segments)
        self.counts.items += len(lengths)
        self.counts.tokens += total
        if self.settings["strategy"] == "best_fit" and len(self.held) < self.settings["pool"]:
            return Plan.join([])
        return self._decide(final=False)

    def finish(self) -> Plan:
        """Give the packs of everything held back."""
        return self._decide(final=True)

    def _decide(self, final: bool) -> Plan:
        held, align = self.held, self.settings["align"]
        if self.settings["strategy"] == "concat":
            held = Segments(*cut_stream(*held.columns, self.room, align))
        places = held.lengths if align == 1 else -(-held.lengths // align) * align
        if self.settings["strategy"] == "best_fit":
            order, offsets, left, self._waits, self._since = best_fit(
                places, self._waits, self._since, self.room, self.settings["pool"], final
            )
        else:
            offsets = next_fit(places, self.room, final)
            order, left = np.split(np.arange(len(held)), offsets[-1:])
        self.held = held.take(left)
        plan = Plan(*held.take(order).columns, offsets)
        self.counts.packs += len(plan)
        self.counts.packed_tokens += int(plan.lengths.sum())
        return plan

    @property
    def first_held(self) -> int:
        """The first item that waits, wholly or in part; where none does, the next to come."""
        return int(self.held.items.min(initial=self.counts.items))

    def state_dict(self) -> dict:
        """Give what a planner of the same settings needs to continue: small, JSON, no tokens."""
        held, first = self.held, self.first_held
        return {
            "version": VERSION,
            "settings": dict(self.settings),
            "counts": asdict(self.counts),
            "first": first,
            "items": to_text(held.items - first),
            "starts": to_text(held.starts),
            "lengths": to_text(held.lengths),
            "waits": to_text(self._waits),
            "since": self._since,
        }

    def load_state_dict(self, state: dict) -> None:
        """Continue where the planner that gave this state stood."""
        if state.get("version") != VERSION:
            raise ValueError(f"planner state of version {state.get('version')}, this is {VERSION}")
        for name, value in self.settings.items():
            if state["settings"].get(name) != value:
                raise ValueError(
                    f"planner state has {name}={state['settings'].get(name)!r}, "
                    f"this planner {name}={value!r}: give both the same"
                )
        items, starts, lengths, waits = (
            from_text(state[name]) for name in ("items", "starts", "lengths", "waits")
        )
        held, counts = Segments(items + state["first"], starts, lengths), Counts(**state["counts"])
        since = int(state["since"])
        if not self._can_hold(held, waits, since, counts):
            raise ValueError("the planner state contradicts itself: it was damaged or edited")
        self.held, self._waits, self._since, self.counts = held, waits, since, counts

    def _can_hold(self, held: Segments, waits: np.ndarray, since: int, counts: Counts) -> bool:
        """Tell whether a state is one that a planner can be in; the loops rely on it."""
        if not len(held.items) == len(held.starts) == len(held.lengths) >= len(waits):
            return False
        if len(held) == 0:
            return counts.held_tokens == since == 0
        most = self.settings["pool"] if self.settings["strategy"] == "best_fit" else self.room
        return bool(
            len(held) < most
            and held.items.max() < counts.items
            and 1 <= held.lengths.min() <= held.lengths.max() <= self.room
            and held.lengths.sum() == counts.held_tokens
            and 0 <= waits.min(initial=0) <= waits.max(initial=0) <= PATIENCE
            and len(waits) <= since < LAPS * self.settings["pool"]
        )


def whole(**settings: int) -> list[int]:
    """Give settings as Python's own integers, whatever kind they came as, or name one that is none.

    >>> whole(budget=np.int64(8), pool=4)
    [8, 4]
    """
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise ValueError(f"{name} {value!r} must be a whole number")
    return [int(value) for value in settings.values()]


def _integers(lengths: np.ndarray) -> np.ndarray:
    """Refuse what is not one row of integers."""
    lengths = np.asarray(lengths)
    if lengths.ndim != 1 or (len(lengths) and lengths.dtype.kind not in "iu"):
        raise ValueError(f"lengths must be one row of integers, got {lengths.dtype}{lengths.shape}")
    return lengths.astype(np.int64, copy=False)


@jit
def _measure(lengths):
    """Give the least, the most and the sum; of nothing, 1, 0 and 0."""
    least = np.int64(1) if len(lengths) == 0 else lengths[0]
    most = total = np.int64(0)
    for length in lengths:
        least = min(least, length)
        most = max(most, length)
        total += length
    return least, most, total
