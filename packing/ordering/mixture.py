"""Mixtures: documents of several sources, drawn so that their shares of tokens follow weights.

Every drawn document pays its length: all sources earn their share of it, the drawn one pays the
whole, and the one with the most credit is drawn next. In whole numbers, so the draw is the same
everywhere, and the shares are right to within a document at any moment, not on average only.

    weights 3 : 1      a a a b a a a b ...        (documents of equal length)

A weight may change with the tokens seen: [(0, 0.9), (10**9, 0.5)] goes from 0.9 to 0.5 in a line,
over all epochs and passes.
When a source runs out:  first  the epoch ends     cycle  it starts again, until all were seen
                         all    the others go on, until all were seen once
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from ..jit import jit

Stop = Literal["first", "cycle", "all"]
Weight = float | Sequence[tuple[int, float]]
SCALE = 1 << 20


class Mixture:
    """Chooses which source the next document comes from.

    >>> mixture = Mixture([3, 1])
    >>> choices, short = mixture.draw([np.full(6, 10), np.full(6, 10)])
    >>> choices.tolist(), short
    ([0, 1, 0, 0, 0, 1, 0, 0], 0)
    """

    def __init__(self, weights: Sequence[Weight], stop: Stop = "first", readers: int = 1):
        """readers: how many draw side by side, so that each sees one in so many tokens."""
        if stop not in ("first", "cycle", "all"):
            raise ValueError(f"stop {stop!r}: choose first, cycle or all")
        self.stop = stop
        at, self.shares = _knots(weights)
        self.at = at // readers
        self.drawn = np.zeros(len(weights), np.int64)
        """Tokens drawn from each source so far."""
        self.restart()

    def restart(self) -> None:
        """Begin an epoch: all sources take part again."""
        self.active = np.ones(len(self.drawn), np.bool_)
        self.seen = np.zeros(len(self.drawn), np.bool_)
        self.credits = self.shares[0].copy()

    def draw(self, lengths: Sequence[np.ndarray]) -> tuple[np.ndarray, int]:
        """Choose among the next documents of each source, given by their lengths.

        Gives the sources in order, and the one whose next length must be known to go on.
        """
        ends = np.cumsum([0, *map(len, lengths)])
        flat = np.concatenate([np.zeros(0, np.int64), *lengths]).astype(np.int64)
        choices = np.empty(len(flat), np.int64)
        count, short = _draw(
            flat, ends, self.at, self.shares, self.credits, self.drawn, self.active, choices
        )
        return choices[:count], short

    def ran_out(self, source: int) -> bool:
        """Note that a source is exhausted; say whether the epoch is over."""
        self.seen[source] = True
        if self.stop == "all":
            self.active[source] = False
            return bool(self.seen.all())
        # A source whose weight has come down to zero for good is not waited for.
        gone = (self.shares[-1] == 0) & (self.drawn.sum() >= self.at[-1])
        return self.stop == "first" or bool((self.seen | gone).all())

    def state_dict(self) -> dict:
        """Give what is needed to continue."""
        return {name: getattr(self, name).tolist() for name in _STATE}

    def load_state_dict(self, state: dict) -> None:
        """Continue from a state."""
        for name in _STATE:
            setattr(self, name, np.array(state[name], getattr(self, name).dtype))


_STATE = ("drawn", "active", "seen", "credits")


def changing(weights: Sequence[Weight]) -> bool:
    """Whether weights follow the tokens seen."""
    return any(isinstance(weight, list | tuple) for weight in weights)


def as_mixture(source: Any) -> list[tuple[Any, Weight]] | None:
    """Recognise a list of (source, weight)."""
    if not isinstance(source, list) or not source:
        return None
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in source):
        return None
    pairs = [(one, w.item() if isinstance(w, np.generic) else w) for one, w in source]
    kinds = int | float | list | tuple
    weighty = all(isinstance(w, kinds) and not isinstance(w, bool) for _, w in pairs)
    if not weighty:
        return None
    for one, _ in pairs:
        ids = one[:1] if isinstance(one, list | tuple) else [one]
        if any(isinstance(first, int | np.integer) for first in ids):
            raise ValueError(
                f"a list of pairs that end in a number is a mixture of (source, weight), and "
                f"{str(one)[:40]} is no source: give documents as lists or dicts of token ids"
            )
    return pairs


def _knots(weights: Sequence[Weight]) -> tuple[np.ndarray, np.ndarray]:
    """Bring constant and changing weights to shares of SCALE at common token counts."""
    lines = [[(0, float(w))] if isinstance(w, int | float) else list(w) for w in weights]
    for line in lines:
        places = [place for place, _ in line]
        if not line or places != sorted(set(places)) or any(w < 0 for _, w in line):
            raise ValueError(f"the weight {line}: give (tokens, weight >= 0) pairs, tokens rising")
    at = np.array(sorted({place for line in lines for place, _ in line} | {0}), np.int64)
    table = np.array([np.interp(at, *np.array(line, float).T) for line in lines]).T
    if (table.sum(1) <= 0).any() or not np.isfinite(table).all():
        raise ValueError(f"the weights {weights} must be finite, and not all zero at any time")
    return at, np.rint(table / table.sum(1, keepdims=True) * SCALE).astype(np.int64)


@jit
def _draw(lengths, ends, at, shares, credits, drawn, active, choices):
    sources = len(drawn)
    following = ends[:-1].copy()
    now = np.empty(sources, np.int64)
    count, knot = 0, 0
    total = drawn.sum()
    while True:
        best = -1
        for s in range(sources):
            if active[s] and (best < 0 or credits[s] > credits[best]):
                best = s
        if best < 0 or following[best] == ends[best + 1]:
            return count, best
        length = lengths[following[best]]
        while knot + 1 < len(at) and at[knot + 1] <= total:
            knot += 1
        earned = 0
        for s in range(sources):
            now[s] = shares[knot, s]
            if knot + 1 < len(at):
                way, past = at[knot + 1] - at[knot], total - at[knot]
                now[s] += (shares[knot + 1, s] - shares[knot, s]) * past // way
            if active[s]:
                credits[s] += now[s] * length
                earned += now[s]
        credits[best] -= earned * length
        drawn[best] += length
        total += length
        following[best] += 1
        choices[count] = best
        count += 1
