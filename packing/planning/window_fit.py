"""Packs of one window of segments after another, in random order.

    pending ─┐
             ├─▶ a window of `pool` ─▶ packs, in random order ─ full? ─ yes ─▶ emitted
    arrivals ┘                                                   │ no
       ▲                                                         ▼
       └───────────────────────────────────────────────────── pending

A window is packed by `random_fit`, a sweep of at most SWEEP segments at a time: the segments of the
packs that are not full take part in the next sweep of the window, so that only the best packs leave
each, and in the last one all. How often a segment waits for another sweep is not counted.

A segment is deferred at most MAX_DEFERRALS times, so it is packed at the latest when 15 windows
have arrived after it. The packs depend only on the segments in their order.

Waiting helps a long segment without a partner only if partners come. Where far fewer arrive than
such long segments, these leave alone at once; deferred, they would all come late, in every epoch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..numba_jit import jit
from .bitset import leading_zeros, unsigned
from .random_fit import BINS, below, bin_shift_of, empty_buckets, mix, random_fit
from .small_set import fit_small_set

SWEEP = 2048
"""Segments packed together; more would choose from more, and leave the same ones over."""
LARGEST_SET = 4096
"""Segments of a whole set that is planned at once (`small_set.py`)."""
MAX_DEFERRALS = 14
"""How often a segment may be deferred."""
FULL = 1000
"""A pack is full if it lacks at most capacity / FULL. Each deferral of one of its segments raises
that by half."""
SURPLUS = 4
"""Standard deviations by which arrivals that need a partner exceed those that fit: no accident."""


class Output(NamedTuple):
    """Packs: their segments in order, their offsets, and what each lacks to be full."""

    order: Any
    offsets: Any
    lacks: Any


@jit
def fit_windows(sizes, deferrals, capacity, pool, defer, flush, final):
    """Pack segments of these sizes (rounded lengths), given in order of arrival.

    deferrals: how often the first segments, those that an earlier call left pending, were deferred;
    defer: whether a window may leave segments to the next one; flush: whether all but the emptiest
    pack are emitted. Returns the segments of the emitted packs, the offsets of these packs, the
    pending segments, and the deferrals of the first of them.
    """
    n, arrived = len(sizes), len(deferrals)
    buckets, out = empty_buckets(capacity), _empty_output(n)
    pending, packs = np.arange(arrived), 0
    flush = flush and sizes.sum() > capacity
    while len(pending) + n - arrived >= pool or ((flush or final) and len(pending) + n > arrived):
        taken = min(pool - len(pending), n - arrived)
        is_set = final and len(deferrals) == 0 and taken <= LARGEST_SET and arrived + taken == n
        window = np.concatenate((pending, np.arange(arrived, arrived + taken)))
        deferrals = np.concatenate((deferrals, np.zeros(taken, np.int64)))
        arrived += taken
        window_sizes = sizes[window]
        fitted = _fit_window(window_sizes, capacity, buckets, is_set)
        emitted = np.ones(len(fitted.lacks), np.bool_)
        if flush and arrived == n:
            _keep_emptiest(fitted, window_sizes, deferrals, pool, emitted)
            flush = False
        elif defer and not (final and arrived == n):
            _count_alone_as_full(fitted, window_sizes, len(pending), capacity)
            overdue = _choose_full(fitted, deferrals, capacity, emitted)
            _balance(fitted, window_sizes, overdue, emitted)
        packs, waiting = _emit(fitted, window, emitted, out, packs)
        pending, deferrals = window[waiting], deferrals[waiting] + 1
    pending = np.concatenate((pending, np.arange(arrived, n)))
    return out.order[: out.offsets[packs]], out.offsets[: packs + 1], pending, deferrals


@jit
def _fit_window(sizes, capacity, buckets, is_set):
    """Pack a window: packs in random order, the segments of each in the order of their arrival."""
    n, arrived, packs, key = len(sizes), 0, 0, np.uint64(0)
    out, trial = _empty_output(n), _empty_output(min(n, SWEEP))
    if is_set:
        packs, key = fit_small_set(sizes, capacity, *buckets, out.order, out.offsets, out.lacks)
        return _arrange(out, packs, key)
    pending, never_deferred = np.zeros(0, np.int64), np.zeros(min(n, SWEEP), np.int64)
    while len(pending) + n > arrived:
        taken = min(SWEEP - len(pending), n - arrived)
        sweep = np.concatenate((pending, np.arange(arrived, arrived + taken)))
        arrived += taken
        count, sweep_key = random_fit(
            sizes[sweep], capacity, *buckets, trial.order, trial.offsets, trial.lacks
        )
        key = mix(key ^ sweep_key)
        fitted = Output(trial.order, trial.offsets, trial.lacks[:count])
        emitted = np.ones(count, np.bool_)
        if arrived < n:
            _choose_full(fitted, never_deferred, capacity, emitted)
        packs, waiting = _emit(fitted, sweep, emitted, out, packs)
        pending = sweep[waiting]
    return _arrange(out, packs, key)


@jit
def _empty_output(n):
    return Output(np.empty(n, np.int64), np.zeros(n + 1, np.int64), np.empty(n, np.int64))


@jit
def _emit(fitted, segments, emitted, out, packs):
    """Append the emitted packs; return the number of all, and which segments are left."""
    order, offsets, lacks = fitted  # numba counts a reference at each access to a field
    out_order, out_offsets, out_lacks = out
    waiting = np.ones(len(segments), np.bool_)
    end = out_offsets[packs]
    for p in range(len(emitted)):
        if emitted[p]:
            for i in range(offsets[p], offsets[p + 1]):
                waiting[unsigned(order[i])] = False
                out_order[unsigned(end)] = segments[unsigned(order[i])]
                end += 1
            out_lacks[packs] = lacks[p]
            packs += 1
            out_offsets[packs] = end
    return packs, waiting


@jit
def _count_alone_as_full(fitted, sizes, first, capacity):
    """Let a segment that is alone in its pack lack nothing, if too few arrivals fit its room.

    first: index of the first arrival; before it are those deferred to this window.
    """
    order, offsets, lacks = fitted
    limit = _scarce_room(sizes[first:], capacity)
    for p in range(len(lacks)):
        if offsets[p + 1] - offsets[p] == 1 and capacity - sizes[order[offsets[p]]] < limit:
            lacks[p] = 0


@jit
def _scarce_room(sizes, capacity):
    """Return the room below which segments that leave so little outnumber those that fit it."""
    shift = bin_shift_of(capacity)
    by_room, by_size = np.zeros(BINS, np.int64), np.zeros(BINS, np.int64)
    for size in sizes:
        by_room[unsigned((capacity - size) >> shift)] += size < capacity
        by_size[unsigned(size >> shift)] += 1
    limit = surplus = both = np.int64(0)
    for k in range((capacity >> shift) // 2):
        surplus += by_room[k] - by_size[k]
        both += by_room[k] + by_size[k]
        if surplus > 0 and surplus**2 > SURPLUS**2 * both:
            limit = (k + 1) << shift
    return limit


@jit
def _choose_full(fitted, deferrals, capacity, emitted):
    """Mark the packs to emit: the full ones, and at least the fullest 30 %.

    Returns which of them have a segment that may not be deferred again.
    """
    order, offsets, lacks = fitted
    limit, least, full = capacity // FULL, _least(len(lacks)), 0
    for lack in lacks:
        full += lack <= limit
    if full < least:
        limit = np.sort(lacks)[least - 1]  # np.partition takes 9 s to compile
    overdue = np.zeros(len(lacks), np.bool_)
    for p in range(len(lacks)):
        times = np.int64(0)
        for i in range(offsets[p], offsets[p + 1]):
            times = max(times, deferrals[order[i]])
        overdue[p] = times >= MAX_DEFERRALS
        emitted[p] = overdue[p] or lacks[p] << times < (limit + 1) * 3**times
    return overdue


@jit
def _keep_emptiest(fitted, sizes, deferrals, pool, emitted):
    """Mark all packs but the one of the fewest tokens, if its segments may be deferred."""
    order, offsets, lacks = fitted
    emptiest, fewest = 0, np.int64(-1)
    for p in range(len(lacks)):
        tokens = np.int64(0)
        for i in range(offsets[p], offsets[p + 1]):
            tokens += sizes[order[i]]
        if fewest < 0 or tokens < fewest:
            emptiest, fewest = p, tokens
    start, end = offsets[emptiest], offsets[emptiest + 1]
    times = np.int64(0)
    for i in range(start, end):
        times = max(times, deferrals[order[i]])
    emitted[emptiest] = times >= MAX_DEFERRALS or end - start >= pool


@jit
def _least(packs):
    return (3 * packs + 9) // 10


@jit
def _balance(fitted, sizes, overdue, emitted):
    """Defer full packs as well, from anywhere, until the deferred segments are as long as all.

    Packs that are not full mostly have short segments, or long ones without a partner; deferring
    these alone would move one end of the length distribution towards the end of the epoch.
    """
    order, offsets, lacks = fitted
    ranks = _ranks(sizes)
    deviations = np.zeros(len(lacks), np.int64)
    excess, left = np.int64(0), -_least(len(lacks))
    for p in range(len(lacks)):
        for i in range(offsets[p], offsets[p + 1]):
            deviations[p] += ranks[order[i]]
        excess += 0 if emitted[p] else deviations[p]
        left += emitted[p]
    sign, excess = np.sign(excess), abs(excess)
    p, stride = 0, _golden_stride(len(lacks))
    for _ in range(len(lacks)):
        change = deviations[p] * sign
        if left > 0 and emitted[p] and not overdue[p] and -excess <= change < 0:
            excess += change
            emitted[p] = False
            left -= 1
        p = (p + stride) % len(lacks)


@jit
def _golden_stride(n):
    """Choose a stride near the golden section that visits all of n, so that neighbours differ."""
    stride = max(1, int(n * 0.618))
    while np.gcd(stride, n) > 1:
        stride += 1
    return stride


@jit
def _ranks(sizes):
    """Return the ranks of the sizes, counted from the middle; those within 3 % share theirs."""
    counts, ranks = np.zeros(2048, np.int64), np.empty(len(sizes), np.int64)
    for i in range(len(sizes)):
        exponent = max(58 - leading_zeros(unsigned(sizes[i])), 0)
        ranks[i] = (exponent << 5) + (sizes[i] >> exponent)
        counts[ranks[i]] += 1
    smaller = -len(sizes)
    for k in range(len(counts)):
        count = counts[k]
        counts[k] = smaller + count
        smaller += 2 * count
    for i in range(len(sizes)):
        ranks[i] = counts[ranks[i]]
    return ranks


@jit
def _arrange(fitted, packs, key):
    """Shuffle the packs, and put the segments of each into the order of their arrival."""
    order, offsets, lacks = fitted
    shuffled, arranged = np.arange(packs), np.empty_like(order)
    ends, lacking = np.zeros(packs + 1, np.int64), np.empty(packs, np.int64)
    end = 0
    for p in range(packs):
        key = mix(key)
        other = p + below(key, packs - p)
        chosen, shuffled[other] = shuffled[other], shuffled[p]
        start = end
        for i in range(offsets[chosen], offsets[chosen + 1]):
            s, place = order[i], end
            while place > start and arranged[unsigned(place - 1)] > s:
                arranged[unsigned(place)] = arranged[unsigned(place - 1)]
                place -= 1
            arranged[unsigned(place)] = s
            end += 1
        lacking[p] = lacks[chosen]
        ends[p + 1] = end
    return Output(arranged, ends, lacking)
