"""The planner: lengths to packs, as a stream and in pure integers.

    feed(lengths) ─▶ too long? split, truncate, drop ─▶ segments ─▶ best_fit: windows ─▶ Plan
                                                                    sequential: next-fit
                                                                    concat: cut at the budget

The packs depend only on the settings and on the lengths in their order: not on how the lengths
were cut into calls, nor on how often the planner was saved and restored in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Literal

import numpy as np

from ..numba_jit import jit
from ..pack import MAX_BUDGET
from ..preparation_progress import announce_compilation
from ..state.int_codec import ints_from_text, ints_to_text
from .best_fit import MAX_DEFERRALS, fit_windows
from .next_fit import cut_stream, next_fit
from .overflow import Counts, Overflow, cut_items
from .plan import Plan
from .segments import Segments

Strategy = Literal["best_fit", "sequential", "concat"]
VERSION = 1
"""Incremented when the state changes, or when the same lengths give other packs."""


def pack_lengths(
    lengths: np.ndarray | Sequence[int],
    budget: int,
    *,
    pool: int | None = 1024,
    strategy: Strategy = "best_fit",
    overflow: Overflow = "split",
    pad_to_multiple_of: int = 1,
    max_length: int | None = None,
) -> Plan:
    """Plan the packs of items of these lengths at once, to inspect them or to pack offline.

    Args:
        lengths: tokens of each item.
        budget: tokens that a pack may hold.
        pool: items that may wait for a pack, as in a stream; None: all of them.
        strategy: "best_fit", "sequential" or "concat", as in `Planner`.
        overflow: of an item longer than a pack: "split", "truncate", "drop" or "error".
        max_length: the longest sequence, if shorter than a pack: `overflow` applies from there.
        pad_to_multiple_of: tokens in a pack that a segment takes are a multiple of this.

    >>> plan = pack_lengths([5, 6, 3, 2, 11], budget=8)
    >>> [pack.tolist() for pack in plan], plan.lengths.tolist(), plan.starts.tolist()
    ([[2], [0, 4], [4], [1, 3]], [3, 5, 3, 8, 6, 2], [0, 0, 8, 0, 0, 0])
    """
    lengths = np.asarray(lengths)
    if pool is None:
        capacity = max(1, budget // max(1, pad_to_multiple_of) * pad_to_multiple_of)
        pool = int((lengths // min(capacity, max_length or capacity) + 1).sum()) + 1
    planner = Planner(
        budget,
        pool=pool,
        strategy=strategy,
        overflow=overflow,
        pad_to_multiple_of=pad_to_multiple_of,
        max_length=max_length,
    )
    return Plan.join([planner.feed(lengths), planner.finish()])


class Planner:
    """Decides which items share a pack; fewer than `pool` segments are pending.

    An item is packed at the latest when 15 · `pool` more segments have arrived (see `best_fit.py`).

    Args:
        budget: tokens that a pack may hold.
        pool: segments that best_fit chooses from; more fill packs better.
        strategy: best_fit: fullest packs; sequential: keeps the order, a pack ends where the next
            item does not fit; concat: keeps the order, items are cut wherever a pack is full.
        overflow: what to do with an item longer than a pack; counted in `counts`.
        max_length: the longest sequence, if shorter than a pack: `overflow` applies from there.
        pad_to_multiple_of: every segment occupies a multiple of this many tokens in its pack; the
            plan's lengths are the true ones.

    >>> planner = Planner(budget=8, pool=4)
    >>> [pack.tolist() for pack in planner.feed(np.array([5, 6, 3, 2]))]
    [[1, 3], [0, 2]]
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
            raise ValueError(f"budget {budget}: a pack has 1 to {MAX_BUDGET} tokens")
        if multiple < 1 or budget < multiple:
            raise ValueError(
                f"pad_to_multiple_of {multiple} must be at least 1 and at most the budget {budget}"
            )
        if pool < 1:
            raise ValueError(f"pool {pool}: at least one segment")
        if max_length is not None and check_ints(max_length=max_length)[0] < 2:
            raise ValueError(f"max_length {max_length}: a sequence needs 2 tokens to learn from")
        self.settings = {
            "budget": budget,
            "pool": pool,
            "strategy": strategy,
            "overflow": overflow,
            "pad_to_multiple_of": multiple,
            "max_length": None if max_length is None else int(max_length),
        }
        self.counts = Counts()
        self.capacity = budget // multiple * multiple
        """Tokens that a pack can hold, rounded down to `pad_to_multiple_of`."""
        self.max_segment = min(self.capacity, self.settings["max_length"] or self.capacity)
        """Tokens that a segment can have."""
        self.cuts_stream = strategy == "concat" and self.max_segment == self.capacity
        """Whether items are cut wherever a pack is full: none of them is too long."""
        self.pending = Segments.empty()
        """Segments that have no pack yet."""
        self._deferrals = np.zeros(0, np.int64)

    def feed(self, lengths: np.ndarray) -> Plan:
        """Take the lengths of the next items; return the packs that are decided now.

        If an item is rejected, none of this call's items are taken.
        """
        lengths = _as_integers(lengths)
        shortest, longest, total = _length_range(lengths)
        if shortest < 1:
            item = self.counts.items + int(np.argmin(lengths))
            raise ValueError(f"item {item} has length {shortest}: remove empty items")
        if longest <= self.max_segment or self.cuts_stream:
            self.pending = self.pending.append_items(self.counts.items, lengths)
        else:
            segments = cut_items(lengths, self.max_segment, self.settings["overflow"], self.counts)
            self.pending = self.pending.append(segments)
        self.counts.items += len(lengths)
        self.counts.tokens += total
        if self.settings["strategy"] == "best_fit" and len(self.pending) < self.settings["pool"]:
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
            pending = Segments(*cut_stream(*pending.columns, self.capacity, multiple))
        lengths = pending.lengths
        sizes = lengths if multiple == 1 else -(-lengths // multiple) * multiple
        if self.settings["strategy"] == "best_fit":
            settings = self.counts.sequences, self.capacity, self.settings["pool"]
            with announce_compilation(fit_windows, "the packer"):
                order, offsets, rest, self._deferrals = fit_windows(
                    sizes, self._deferrals, *settings, flush, final
                )
        else:
            offsets = next_fit(sizes, self.capacity, final)
            order, rest = np.split(np.arange(len(pending)), offsets[-1:])
        self.pending = pending.take(rest)
        plan = Plan(*pending.take(order).columns, offsets)
        self.counts.packs += len(plan)
        self.counts.packed_tokens += int(plan.lengths.sum())
        self.counts.sequences += len(plan.items)
        return plan

    @property
    def first_pending(self) -> int:
        """The first item that is pending at least in part; if none is, the next to arrive."""
        return int(self.pending.items.min(initial=self.counts.items))

    def state_dict(self) -> dict:
        """Return what a planner with the same settings needs to continue: small JSON, no tokens."""
        pending, first = self.pending, self.first_pending
        return {
            "version": VERSION,
            "settings": dict(self.settings),
            "counts": asdict(self.counts),
            "first": first,
            "items": ints_to_text(pending.items - first),
            "starts": ints_to_text(pending.starts),
            "lengths": ints_to_text(pending.lengths),
            "deferrals": ints_to_text(self._deferrals),
        }

    def load_state_dict(self, state: dict) -> None:
        """Continue from the state of another planner with the same settings."""
        if state.get("version") != VERSION:
            raise ValueError(f"planner state of version {state.get('version')}, this is {VERSION}")
        for name, value in self.settings.items():
            if state["settings"].get(name) != value:
                raise ValueError(
                    f"planner state has {name}={state['settings'].get(name)!r}, "
                    f"this planner {name}={value!r}: use the same for both"
                )
        items, starts, lengths, deferrals = (
            ints_from_text(state[name]) for name in ("items", "starts", "lengths", "deferrals")
        )
        pending = Segments(items + state["first"], starts, lengths)
        counts = Counts(**state["counts"])
        if not self._is_valid(pending, deferrals, counts):
            raise ValueError("the planner state contradicts itself: it was damaged or edited")
        self.pending, self._deferrals, self.counts = pending, deferrals, counts

    def _is_valid(self, pending: Segments, deferrals: np.ndarray, counts: Counts) -> bool:
        """Return whether a planner can be in this state; the compiled loops rely on it."""
        starts, lengths = pending.starts, pending.lengths
        if not len(pending.items) == len(starts) == len(lengths) >= len(deferrals):
            return False
        if len(pending) == 0:
            return counts.pending_tokens == 0
        pool, best_fits = self.settings["pool"], self.settings["strategy"] == "best_fit"
        return bool(
            len(pending) < (pool if best_fits else self.capacity)
            and pending.items.max() < counts.items
            and 1 <= lengths.min() <= lengths.max() <= self.max_segment
            and lengths.sum() == counts.pending_tokens
            and 0 <= deferrals.min(initial=0) <= deferrals.max(initial=0) <= MAX_DEFERRALS
        )


def check_ints(**settings: int) -> list[int]:
    """Return settings as Python integers, or raise naming the one that is not an integer.

    >>> check_ints(budget=np.int64(8), pool=4)
    [8, 4]
    """
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise ValueError(f"{name} {value!r} must be an integer")
    return [int(value) for value in settings.values()]


def _as_integers(lengths: np.ndarray) -> np.ndarray:
    lengths = np.asarray(lengths)
    if lengths.ndim != 1 or (len(lengths) and lengths.dtype.kind not in "iu"):
        raise ValueError(f"lengths must be one row of integers, got {lengths.dtype}{lengths.shape}")
    return lengths.astype(np.int64, copy=False)


@jit
def _length_range(lengths):
    """Return the smallest, the largest and the sum; for no lengths 1, 0 and 0."""
    shortest = np.int64(1) if len(lengths) == 0 else lengths[0]
    longest = total = np.int64(0)
    for length in lengths:
        shortest = min(shortest, length)
        longest = max(longest, length)
        total += length
    return shortest, longest, total
