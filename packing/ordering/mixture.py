"""Mixtures: draw documents of several sources so that their token counts follow weights.

Every source has a credit. A drawn document of n tokens gives each source its fraction of n and
costs the drawn source n; the source with the highest credit is drawn next. The arithmetic uses
integers, so the draw is the same everywhere, and at any time the fractions are exact to within
one document, not only on average. Credits continue in the next epoch: an epoch ends where its
exhausted source would be drawn, so without them every epoch would draw too little of it.

    weights 3 : 1      a a a b a a a b ...        (documents of equal length)

A weight may change with the tokens drawn: [(0, 0.9), (10**9, 0.5)] falls linearly from 0.9 to 0.5
over all epochs and passes. A source is not drawn while its weight is zero; if no other is left, the
epoch ends.

A packer reorders the documents it is given. Where weights change, they are given to it interval by
interval: inside one, any order of the documents is within a fraction of a pack of the schedule.

When a source is exhausted, as in `datasets.interleave_datasets`:

    first_exhausted                      the epoch ends
    all_exhausted                        it starts again, until all sources were read once
    all_exhausted_without_replacement    the others continue, until all sources were read once
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from ..numba_jit import jit
from .permutation import ORDER_BLOCK, epoch_order

StoppingStrategy = Literal["first_exhausted", "all_exhausted", "all_exhausted_without_replacement"]
Weight = float | Sequence[tuple[int, float]]
SCALE = 1 << 20
"""Fractions are integers in units of 1 / SCALE."""
CURVE_KNOTS = 257
"""Knots, from one of the user's to the next, of fractions that are not linear in between."""
DRAWN_AT_ONCE = 1024
"""Documents of a source that are offered to the draw at a time."""
INTERVAL_END = -2
"""Returned by `draw` instead of a source, at the end of an interval of the schedule."""
_STATE_FIELDS = ("tokens_drawn", "active", "exhausted", "credits")


class Mixture:
    """Chooses the source of each next document.

    >>> mixture = Mixture([3, 1])
    >>> choices, needed = mixture.draw([np.full(6, 10), np.full(6, 10)])
    >>> choices.tolist(), needed
    ([0, 1, 0, 0, 0, 1, 0, 0], 0)
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        stopping_strategy: StoppingStrategy = "first_exhausted",
        num_readers: int = 1,
        budget: int | None = None,
    ):
        """Start before the first document.

        num_readers: how many mixtures draw in parallel, each 1 / num_readers of the tokens;
        budget: tokens of a pack, for the intervals of a schedule; None: it is not divided.
        """
        self.stopping_strategy = check_stopping_strategy(stopping_strategy)
        knots, self.fractions = weight_schedule(weights)
        self.knots = knots // num_readers
        """Tokens drawn at which the rows of `fractions` apply; linear in between."""
        ends = [] if budget is None else schedule_intervals(knots, self.fractions / SCALE, budget)
        self._interval_ends = np.array([*ends, np.iinfo(np.int64).max]) // num_readers
        """Tokens drawn at which the intervals of the schedule end."""
        self.tokens_drawn = np.zeros(len(weights), np.int64)
        """Tokens drawn from each source so far."""
        self.credits = self.fractions[0].copy()
        self.restart()

    def restart(self) -> None:
        """Start an epoch: all sources take part again."""
        self.active = np.ones(len(self.tokens_drawn), np.bool_)
        self.exhausted = np.zeros(len(self.tokens_drawn), np.bool_)

    def draw(self, lengths: Sequence[np.ndarray]) -> tuple[np.ndarray, int]:
        """Draw from the queued documents of each source, given by their lengths.

        Returns the sources in the order drawn, and the source whose queue is empty but whose
        next length is needed to continue; -1 if no source is active, or their weights are zero;
        INTERVAL_END if the last document ends an interval of the schedule.
        """
        drawn = self.tokens_drawn.sum()
        interval_end = self._interval_ends[np.searchsorted(self._interval_ends, drawn, "right")]
        ends = np.cumsum([0, *map(len, lengths)])
        flat = np.concatenate([np.zeros(0, np.int64), *lengths]).astype(np.int64)
        choices = np.empty(len(flat), np.int64)
        count, needed = _draw(
            flat,
            ends,
            self.knots,
            self.fractions,
            self.credits,
            self.tokens_drawn,
            self.active,
            interval_end,
            choices,
        )
        return choices[:count], needed

    def mark_exhausted(self, source: int) -> bool:
        """Record that a source is exhausted; return whether the epoch ends."""
        self.exhausted[source] = True
        # The epoch does not wait for a source whose weight is zero from now on.
        knot = np.searchsorted(self.knots, self.tokens_drawn.sum(), "right") - 1
        retired = (self.fractions[knot:] == 0).all(0)
        if self.stopping_strategy == "all_exhausted_without_replacement":
            self.active &= ~(self.exhausted | retired)
            return not self.active.any()
        first_ends = self.stopping_strategy == "first_exhausted"
        return first_ends or bool((self.exhausted | retired).all())

    def state_dict(self) -> dict:
        """Return the state as JSON."""
        return {name: getattr(self, name).tolist() for name in _STATE_FIELDS}

    def load_state_dict(self, state: dict) -> None:
        """Continue from a state."""
        for name in _STATE_FIELDS:
            setattr(self, name, np.array(state[name], getattr(self, name).dtype))


def check_stopping_strategy(name: StoppingStrategy) -> StoppingStrategy:
    """Return the strategy, or raise if the name is unknown."""
    if name not in (choices := get_args(StoppingStrategy)):
        raise ValueError(f"stopping_strategy={name!r}: choose {', '.join(choices)}")
    return name


def has_schedule(weights: Sequence[Weight]) -> bool:
    """Return whether any weight changes with the tokens drawn."""
    return any(isinstance(weight, list | tuple) for weight in weights)


def parse_mixture(source: Any) -> list[tuple[Any, Weight]] | None:
    """Return the (source, weight) pairs of a mixture; None if `source` is something else."""
    if not isinstance(source, list) or not source:
        return None
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in source):
        return None
    pairs = [(part, w.item() if isinstance(w, np.generic) else w) for part, w in source]
    weight_types = int | float | list | tuple
    if not all(isinstance(w, weight_types) and not isinstance(w, bool) for _, w in pairs):
        return None
    for part, _ in pairs:
        ids = part[:1] if isinstance(part, list | tuple) else [part]
        if any(isinstance(first, int | np.integer) for first in ids):
            raise ValueError(
                f"a list of pairs that end in a number is a mixture of (source, weight), but "
                f"{str(part)[:40]} is not a source: pass documents as lists or dicts of token ids"
            )
    weight_schedule([weight for _, weight in pairs])  # raises for weights that cannot be drawn by
    return pairs


def source_names(pairs: Sequence[tuple[Any, Weight]]) -> list[str]:
    """Return a different name for each source of a mixture: its file or folder, or its number.

    >>> source_names([("web/", 2), ("new/code.jsonl", 1), ("old/code.jsonl", 1), ([[5, 6]], 1)])
    ['web', 'code.jsonl', 'code.jsonl_2', 'source_3']
    >>> source_names([("https://host/x.jsonl?path=a/b&signature=KEY", 1)])
    ['x.jsonl']
    """
    names: list[str] = []
    for number, (source, _) in enumerate(pairs):
        path = str(source) if isinstance(source, str | Path) else ""
        path = path.partition("?")[0] if "://" in path else path  # a query may hold a key
        name = Path(path).name or f"source_{number}"
        while name in names:
            name = f"{name}_{number}"
        names.append(name)
    return names


def weight_schedule(weights: Sequence[Weight]) -> tuple[np.ndarray, np.ndarray]:
    """Convert constant and changing weights to fractions of SCALE at common token counts."""
    lines = [[(0, float(w))] if isinstance(w, int | float) else list(w) for w in weights]
    for line in lines:
        pairs = all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in line)
        numbers = pairs and all(isinstance(x, int | float | np.number) for p in line for x in p)
        tokens = [count for count, _ in line] if numbers else []
        if not tokens or tokens != sorted(set(tokens)) or any(w < 0 for _, w in line):
            raise ValueError(
                f"the weight {line}: pass (tokens, weight >= 0) pairs, tokens increasing"
            )
    knots = np.array(sorted({count for line in lines for count, _ in line} | {0}), np.int64)
    table = _interpolate(lines, knots)
    sums = table.sum(1)
    if (sums <= 0).any() or not np.isfinite(table).all():
        raise ValueError(f"the weights {weights} must be finite, and not all zero at any time")
    if not np.allclose(sums, sums[0]):  # weights that change linearly are fractions that do not
        parts = [np.linspace(a, b, CURVE_KNOTS).astype(np.int64) for a, b in pairwise(knots)]
        knots = np.unique(np.concatenate(parts))
        table = _interpolate(lines, knots)
    fractions = np.rint(table / table.sum(1, keepdims=True) * SCALE).astype(np.int64)
    lost = (table > 0).any(0) & (fractions == 0).all(0)
    if lost.any():
        raise ValueError(
            f"the weight {weights[int(lost.argmax())]} is less than {0.5 / SCALE:.0e} of the sum, "
            "so its source would never be read: raise it, or remove the source"
        )
    return knots, fractions


def _interpolate(lines: Sequence[Sequence[tuple[int, float]]], knots: np.ndarray) -> np.ndarray:
    return np.array([np.interp(knots, *np.array(line, float).T) for line in lines]).T


def schedule_intervals(knots: np.ndarray, fractions: np.ndarray, budget: int) -> list[int]:
    """Divide a schedule into intervals, given by the tokens at their ends.

    In an interval of n tokens a fraction changes by at most 2 · budget / n. If all of its packs had
    the same fractions, the tokens of a source would differ from the schedule by at most half a
    pack at any of them, a quarter of one where the change is linear.

    >>> schedule_intervals(np.array([0, 800]), np.array([[1, 0], [0, 1]]), budget=100)
    [400, 800]
    """
    ends, start, begin, change = [], 0.0, 0.0, 0.0
    slopes = np.abs(np.diff(fractions, axis=0)).max(1) / np.diff(knots)
    for knot, slope in zip([*knots[1:].tolist(), np.inf], [*slopes, 0.0], strict=True):
        while (end := begin + _longest_step(begin - start, change, slope, 2 * budget)) < knot:
            begin, start, change = end, end, 0.0
            ends.append(int(end))
        begin, change = knot, change + slope * (knot - begin) if slope else change
    return ends


def _longest_step(elapsed: float, change: float, slope: float, limit: float) -> float:
    """Return the largest x with (elapsed + x) · (change + slope · x) <= limit, or 0."""
    half = (change + slope * elapsed) / 2
    rest = limit - elapsed * change
    if not slope:
        return max(rest / change, 0.0) if change else np.inf
    return max((np.sqrt(half**2 + slope * rest) - half) / slope, 0.0) if rest > 0 else 0.0


@jit
def _draw(lengths, ends, knots, fractions, credits, tokens_drawn, active, interval_end, choices):
    num_sources = len(tokens_drawn)
    heads = ends[:-1].copy()
    current = np.empty(num_sources, np.int64)
    count, knot = 0, 0
    total = tokens_drawn.sum()
    while True:
        while knot + 1 < len(knots) and knots[knot + 1] <= total:
            knot += 1
        best, earned = -1, 0
        for s in range(num_sources):
            current[s] = fractions[knot, s]
            if knot + 1 < len(knots):
                span, offset = knots[knot + 1] - knots[knot], total - knots[knot]
                current[s] += (fractions[knot + 1, s] - fractions[knot, s]) * offset // span
            if active[s] and current[s] > 0:
                earned += current[s]
                if best < 0 or credits[s] > credits[best]:
                    best = s
        if best < 0 or heads[best] == ends[best + 1]:
            return count, best
        length = lengths[heads[best]]
        for s in range(num_sources):
            if active[s]:
                credits[s] += current[s] * length
        credits[best] -= earned * length
        tokens_drawn[best] += length
        total += length
        heads[best] += 1
        choices[count] = best
        count += 1
        if total >= interval_end:
            return count, INTERVAL_END


STEPS = 256
"""Steps between two token counts of a schedule, each with constant weights."""


def estimate_epoch(
    tokens: Sequence[float] | np.ndarray,
    weights: Sequence[Weight],
    stopping_strategy: StoppingStrategy,
) -> np.ndarray:
    """Estimate the tokens that the first epoch draws from each source, given those it has.

    >>> estimate_epoch([300, 100], [1, 1], "first_exhausted").tolist()
    [100.0, 100.0]
    >>> estimate_epoch([300, 100], [1, 1], "all_exhausted").tolist()
    [300.0, 300.0]
    """
    knots, table = weight_schedule(weights)
    available, total = np.asarray(tokens, float), 0.0
    drawn, exhausted = np.zeros_like(available), np.zeros(len(available), bool)
    while True:
        share = np.array([np.interp(total, knots, each) for each in table.T])
        if stopping_strategy == "all_exhausted_without_replacement":
            share[exhausted] = 0
        knot = int(np.searchsorted(knots, total, "right"))
        retired = (table[knot - 1 :] == 0).all(0)
        any_ends = stopping_strategy == "first_exhausted" and exhausted.any()
        if any_ends or (exhausted | retired).all() or not share.any():
            return drawn
        share /= share.sum()
        next_knot = np.inf
        if knot < len(knots):
            step = max(1.0, (knots[knot] - knots[knot - 1]) / STEPS)
            next_knot = min(total + step, float(knots[knot]))
        waiting, ends = (share > 0) & ~exhausted, np.full(len(share), np.inf)
        ends[waiting] = total + (available[waiting] - drawn[waiting]) / share[waiting]
        end = min(next_knot, ends.min())
        drawn, total = drawn + share * (end - total), end
        exhausted |= ends <= end


class MixedOrder:
    """The documents of several sources, numbered consecutively and drawn by weight."""

    def __init__(
        self,
        first_documents: Sequence[int],
        lengths: Callable[[np.ndarray], np.ndarray],
        mixture: Mixture,
        seed: int,
        shuffle: bool,
    ):
        """Source s holds the documents first_documents[s]:first_documents[s + 1].

        mixture: at the beginning of the first epoch; it is copied, not changed.
        """
        self.first_documents, self.lengths = first_documents, lengths
        self.mixture, self.seed, self.shuffle = mixture, seed, shuffle
        self._before = 0, mixture.state_dict()
        """An epoch, and the state of the mixture before it."""

    def read(self, epoch: int) -> Iterator[np.ndarray]:
        """Yield the documents of an epoch in blocks; each interval of a schedule ends a block."""
        mixture, (first, state) = deepcopy(self.mixture), self._before
        if first > epoch:
            first = 0
        else:
            mixture.load_state_dict(state)
        for earlier in range(first, epoch):
            for _ in self.epoch(earlier, mixture):
                pass
        self._before = epoch, mixture.state_dict()
        yield from self.epoch(epoch, mixture)
        self._before = epoch + 1, mixture.state_dict()

    def epoch(self, epoch: int, mixture: Mixture) -> Iterator[np.ndarray]:
        """Yield the blocks of an epoch; `mixture` has drawn the previous ones, and draws it."""
        mixture.restart()
        waiting: list[np.ndarray] = []
        count = 0
        for documents, needed in self._draws(epoch, mixture):
            waiting.append(documents)
            count += len(documents)
            if needed == INTERVAL_END or count >= ORDER_BLOCK:
                yield np.concatenate(waiting)
                waiting, count = [], 0
        if count:
            yield np.concatenate(waiting)

    def _draws(self, epoch: int, mixture: Mixture) -> Iterator[tuple[np.ndarray, int]]:
        """Yield the documents that each call of the mixture draws, and what it needs next."""
        laps = [0] * (len(self.first_documents) - 1)
        blocks = [self._lap(source, epoch, 0) for source in range(len(laps))]
        queues = [np.zeros(0, np.int64) for _ in laps]
        while True:
            # A few of each queue: a long one would be read again for every lap of a small source.
            lengths = [self.lengths(queue[:DRAWN_AT_ONCE]) for queue in queues]
            choices, needed = mixture.draw(lengths)
            yield self._take(choices, queues), needed
            if needed == INTERVAL_END or (needed >= 0 and len(queues[needed])):
                continue
            if needed < 0:
                return
            block = next(blocks[needed], None)
            if block is not None:
                queues[needed] = block
            elif mixture.mark_exhausted(needed):
                return
            elif mixture.stopping_strategy == "all_exhausted":
                laps[needed] += 1
                blocks[needed] = self._lap(needed, epoch, laps[needed])

    def _take(self, choices: np.ndarray, queues: list[np.ndarray]) -> np.ndarray:
        """Remove the chosen documents from the queues and return them in the order of choice."""
        documents = np.empty(len(choices), np.int64)
        for source in range(len(queues)):
            chosen = choices == source
            count = int(chosen.sum())
            documents[chosen], queues[source] = queues[source][:count], queues[source][count:]
        return documents

    def _lap(self, source: int, epoch: int, lap: int) -> Iterator[np.ndarray]:
        first = self.first_documents[source]
        n = self.first_documents[source + 1] - first
        if not n or (lap and not self.lengths(np.arange(first, first + n)).any()):
            raise ValueError(
                f"source {source} of the mixture is empty, or all of it is dropped: remove it"
            )
        for block in epoch_order(n, self.seed, epoch, self.shuffle, f"{source}.{lap}"):
            yield first + block
