"""Best fit, a window of segments at a time: packs that are full, segments that meet by chance.

    pending ─┐
             ├─▶ a window of `pool` ─▶ packs, in random order ─ full? ─ yes ─▶ emitted
    arrivals ┘                                                   │ no
       ▲                                                         ▼
       └───────────────────────────────────────────────────── pending

A window is packed in one of several ways, from the most random to the fullest: `random_fit` with a
wide tolerance, with a narrow one, with the longest first, with pairs first, and best-fit
decreasing. The first one that needs hardly more packs than the fewest is taken. That is known at
once if the tokens could not fill fewer packs, which holds for most length distributions. Where most
packs are pairs it is best-fit decreasing, and in a small last window the best of all ways.

A segment is deferred at most MAX_DEFERRALS times, so it is packed at the latest when 15 windows
have arrived after it. The packs depend only on the segments in their order: what looks random is a
hash of the sizes.
"""

from __future__ import annotations

import numpy as np

from ..numba_jit import jit
from .best_fit import best_fit
from .random_fit import hash_sizes, mix, random_fit

MAX_DEFERRALS = 14
"""How often a segment may be deferred."""
FULL = 1000
"""A pack is full enough to be emitted if it lacks at most capacity / FULL."""
NARROW = 2048
"""The narrow tolerance of `random_fit` is capacity / NARROW."""
EXTRA, SMALL_SET_EXTRA, SMALL_SET = 2000, 250, 2000
"""One pack in EXTRA is spent on chance; in a set of fewer segments than SMALL_SET, one in
SMALL_SET_EXTRA."""
PAIRS = 0.6
"""Most packs are pairs if segments over half a pack are this share of the packs, and those under a
quarter are fewer than this share of the former. Then only best-fit decreasing fills packs."""
THOROUGH = 4096
"""The last window is packed in all ways if it has at most this many segments."""
RETRIES = 4
"""How often the last window is tried again, with the longest first, to save a pack."""
HALVINGS = 4
"""How often a wide tolerance is halved until it needs no more packs."""
BEST_FIT_POOL = 1024
"""Segments that best-fit decreasing looks at together; more would leave more empty."""


def fit_windows(
    sizes: np.ndarray,
    deferrals: np.ndarray,
    capacity: int,
    pool: int,
    *,
    defer: bool,
    final: bool,
    small: bool,
) -> tuple[np.ndarray, ...]:
    """Pack segments of these sizes (rounded lengths), given in order of arrival.

    deferrals: how often the first segments, those that an earlier call left pending, were deferred;
    defer: whether segments may be; small: the set is a small one. Returns the segments of the
    emitted packs, the offsets of these packs, the pending segments, and the deferrals of the first
    of them.
    """
    arrived, orders, counts = len(deferrals), [], []
    pending = np.arange(arrived)
    while len(pending) + len(sizes) - arrived >= pool or final:
        taken = min(pool - len(pending), len(sizes) - arrived)
        window = np.concatenate([pending, np.arange(arrived, arrived + taken)])
        if not len(window):
            break
        deferrals = np.concatenate([deferrals, np.zeros(taken, np.int64)])
        arrived += taken
        last = final and arrived == len(sizes)
        thorough = last and len(window) <= THOROUGH
        order, offsets, slack = _fit(sizes[window], capacity, thorough, small and last)
        emitted = np.ones(len(slack), bool)
        if defer and not last:
            most_deferred = np.maximum.reduceat(deferrals[order], offsets[:-1])
            emitted = _emitted(sizes[window[order]], offsets, slack, most_deferred, capacity)
        in_emitted = np.repeat(emitted, np.diff(offsets))
        orders.append(window[order[in_emitted]])
        counts.append(np.diff(offsets)[emitted])
        rest = np.sort(order[~in_emitted])
        pending, deferrals = window[rest], deferrals[rest] + 1
    none = np.zeros(0, np.int64)
    offsets = np.concatenate([[0], np.cumsum(np.concatenate([none, *counts]))]).astype(np.int64)
    pending = np.concatenate([pending, np.arange(arrived, len(sizes))])
    return np.concatenate([none, *orders]), offsets, pending, deferrals


def _fit(sizes: np.ndarray, capacity: int, thorough: bool, small: bool) -> tuple[np.ndarray, ...]:
    """Pack a window; return the segments, the offsets and the slack of its packs.

    The packs are in random order, the segments of a pack in the order of their arrival.
    """
    order, offsets, slack = _most_random(sizes, capacity, thorough, small)
    packs = np.argsort(_noise(sizes, len(slack)), kind="stable")
    return *_arrange(order, offsets, packs), slack[packs]


def _most_random(sizes: np.ndarray, capacity: int, thorough: bool, small: bool):
    """Pack a window in the first way that needs hardly more packs than the fewest.

    thorough: try all ways. A wide tolerance suits the last window only, where nothing but the
    number of packs counts.
    """
    total, narrow = int(sizes.sum()), capacity // NARROW
    extra = SMALL_SET_EXTRA if small else EXTRA

    def tolerances(packs: int, count: int) -> list[int]:
        mean_slack = (packs * capacity - total) // packs
        wide = [mean_slack >> i for i in range(count)] if thorough else []
        return [tolerance for tolerance in wide if tolerance > 2 * narrow]

    fewest = -(-total // capacity)
    ways = [(tolerance, "", 0) for tolerance in [*tolerances(fewest, 1), narrow]]
    ways += [(narrow, "longest", salt) for salt in range(RETRIES if thorough else 0)]
    ways.append((narrow, "pairs", 0))
    fits = []
    long, short = int((2 * sizes > capacity).sum()), int((4 * sizes <= capacity).sum())
    pairs = long > PAIRS * fewest and short < PAIRS * long
    for tolerance, first, salt in ways if thorough or not pairs else []:
        fits.append(random_fit(sizes, capacity, tolerance, first != "", first == "pairs", salt))
        if len(fits[-1][2]) <= fewest + fewest // extra:
            return fits[-1]
    order, offsets = best_fit(sizes, capacity, min(len(sizes), BEST_FIT_POOL))
    ends = np.concatenate([[0], np.cumsum(sizes[order])])
    fits.append((order, offsets, capacity - np.diff(ends[offsets])))
    fewest = min(len(slack) for _, _, slack in fits)
    for tolerance in tolerances(fewest, HALVINGS):
        fit = random_fit(sizes, capacity, tolerance, False, False, 0)
        if len(fit[2]) <= fewest + fewest // extra:
            return fit
    return next(fit for fit in fits if len(fit[2]) <= fewest + fewest // extra)


def _emitted(sizes, offsets, slack, deferrals, capacity) -> np.ndarray:
    """Choose the packs to emit: the full ones, and at least the fullest 30 %.

    Each deferral of a pack's segments raises the slack that counts as full by half. Packs that are
    not full mostly have short segments, or long ones without a partner; deferring these alone
    would move one end of the length distribution towards the end of the epoch. So full packs are
    deferred as well, at random, until the deferred segments are as long as all.
    """
    least = (3 * len(slack) + 9) // 10
    limit = max(capacity // FULL, int(np.partition(slack, least - 1)[least - 1]))
    overdue = deferrals >= MAX_DEFERRALS
    emitted = (slack < (limit + 1) * 1.5**deferrals) | overdue
    ranks = np.empty(len(sizes))
    ranks[np.argsort(sizes, kind="stable")] = np.arange(len(sizes)) - (len(sizes) - 1) / 2
    deviations = np.add.reduceat(ranks, offsets[:-1])
    excess = deviations[~emitted].sum()
    opposite = np.flatnonzero(emitted & ~overdue & (deviations * excess < 0))
    count = np.searchsorted(np.cumsum(np.abs(deviations[opposite])), abs(excess))
    emitted[opposite[: min(count, max(0, int(emitted.sum()) - least))]] = False
    return emitted


@jit
def _arrange(order, offsets, packs):
    """Put the packs into this order, and the segments of each into the order of their arrival."""
    arranged, ends = np.empty_like(order), np.zeros_like(offsets)
    end = 0
    for p in range(len(packs)):
        start = end
        for i in range(offsets[packs[p]], offsets[packs[p] + 1]):
            place = end
            while place > start and arranged[place - 1] > order[i]:
                arranged[place] = arranged[place - 1]
                place -= 1
            arranged[place] = order[i]
            end += 1
        ends[p + 1] = end
    return arranged, ends


@jit
def _noise(sizes, count):
    """Return one random number per pack, a function of the sizes in their order."""
    noise = np.empty(count, np.uint64)
    key = hash_sizes(sizes)
    for i in range(count):
        key = mix(key)
        noise[i] = key
    return noise
