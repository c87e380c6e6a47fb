"""Best fit over a small pool: emit packs that are full, defer the rest for a better fit.

    arrivals ─▶ completes a pack with a pooled segment? ─ yes ─▶ emit
                  │ no
                  ▼
                 pool ── full ─▶ trial packs of all segments ─▶ full enough? ─ yes ─▶ emit
                  ▲                                                 │ no
                  └─────────────────────────────────────────────────┘

An arrival is emitted at once together with a pooled segment if the two fill a pack. If long
segments (over half a pack) are over a third of the pool, so that most packs are pairs, such a pair
may be slightly underfull: by nothing while the pool is at most half full, then by up to 0.25 % of
the budget. The pool thus stays nearly full, and only the best pairs leave it.

A sweep takes place when the pool is full, at the latest after 4 · `pool` arrivals. It puts all
segments into trial packs by best-fit decreasing: the longest segment opens a pack, then follows
the largest that fits, or a pair that fills the rest exactly. A pack is full enough if its slack is
at most 0.5 % of the budget, or if it is among the fullest 30 % of its sweep. While the pool holds
many long segments, packs without one are deferred: the long segments need the short ones.

Each deferral of a segment raises the slack allowed for its next pack by half, so after
MAX_DEFERRALS any pack is full enough (0.5 % · 1.5^14 > 100 %): a segment takes part in at most 15
sweeps. The result depends only on the pool and the arrivals since the last sweep, so the packs do
not depend on how the arrivals were cut into calls.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..numba_jit import jit
from .bitset import add, contains, discard, empty_bitset, largest_at_most, largest_within, unsigned
from .random_fit import golden_stride

MAX_DEFERRALS = 14
"""How often a segment may be deferred."""
MAX_POOLS_PER_SWEEP = 4
"""A sweep takes place after this many pools of arrivals even if the pool is not full."""
PAIR_PROBES, LARGE_POOL_PAIR_PROBES, LARGE_POOL = 4, 2, 4096
"""Pairs tried, from the most unequal to the most equal, for one that fills a pack exactly.

More probes would fill more packs exactly, and use up the short segments that the long ones need;
the larger the pool, the more often a pair is found. On hard length distributions these values
leave 0.2 to 6 points less empty than best-fit decreasing for any pool; sixteen probes would leave
up to 1 point more."""
SLACK_GROWTH = 1.5 ** np.arange(MAX_DEFERRALS + 1)
"""Factor on the allowed slack of a pack, by the highest deferral count of its segments."""
PAIR_SLACK_DIVISOR = 400
"""With a full pool, a pair may lack budget / PAIR_SLACK_DIVISOR."""


class Buckets(NamedTuple):
    """The pooled segments by size: a linked list of slots per size, newest first, and a bitset."""

    heads: Any
    """int32 [budget + 1]: the first slot of each size, or -1."""
    links: Any
    """int32 [slots]: the next slot of the same size, or -1."""
    low: Any
    high: Any
    """The bitset of sizes whose list is not empty."""


class Output(NamedTuple):
    """The emitted packs: the segments in order, and the offsets of the packs."""

    order: Any
    offsets: Any


class PoolState(NamedTuple):
    """Counters of the pool."""

    arrived: int
    """Segments taken from the arrivals."""
    used: int
    """Slots used since the last sweep."""
    pooled: int
    """Segments in the pool."""
    long: int
    """Those of them longer than half a pack."""
    packs: int
    """Packs emitted."""


class TrialPacks(NamedTuple):
    """The trial packs of a sweep."""

    slots: Any
    """int64 [pool]: the slots of all packs."""
    ends: Any
    """int64 [pool + 1]: where each pack ends in `slots`."""
    slack: Any
    """int64 [pool]: the unused capacity of each pack."""
    deferrals: Any
    """int64 [pool]: the highest deferral count among the segments of each pack."""


@jit
def best_fit(sizes, budget, pool):
    """Pack segments of these sizes (rounded lengths), given in order of arrival.

    Returns the segments of the packs, and the offsets of the packs.
    """
    n, num_slots = len(sizes), MAX_POOLS_PER_SWEEP * pool
    out = Output(np.empty(n, np.int64), np.zeros(n + 1, np.int64))
    segment_of, deferral_counts = np.arange(num_slots), np.zeros(num_slots, np.int64)
    trial = TrialPacks(
        np.empty(pool, np.int64),
        np.zeros(pool + 1, np.int64),
        np.empty(pool, np.int64),
        np.empty(pool, np.int64),
    )
    low, high = empty_bitset(budget)
    heads = np.full(budget + 1, -1, np.int32)
    buckets = Buckets(heads, np.empty(num_slots, np.int32), low, high)
    probes = PAIR_PROBES if pool <= LARGE_POOL else LARGE_POOL_PAIR_PROBES
    state = PoolState(0, 0, 0, 0, 0)
    while True:
        state = _take_arrivals(
            sizes, state, budget, pool, segment_of, deferral_counts, buckets, out
        )
        if state.pooled == 0:
            break
        last = state.arrived == n
        count, num_long = _build_trial_packs(buckets, deferral_counts, budget, probes, trial)
        if last or 5 * state.long <= 2 * state.pooled:
            num_long = count
        limit = budget if last else _slack_limit(trial.slack[:num_long], budget)
        emitted, pooled = _emit_full_packs(
            segment_of, deferral_counts, trial, count, num_long, limit, out, state.packs
        )
        long = _insert_all(sizes, segment_of[:pooled], budget, buckets)
        state = PoolState(state.arrived, pooled, pooled, long, state.packs + emitted)
    return out.order[: out.offsets[state.packs]], out.offsets[: state.packs + 1]


@jit
def _insert_all(sizes, segment_of, budget, buckets):
    """Insert the segments of the first slots into the buckets; return how many are long."""
    heads, links, low, high = buckets
    long = 0
    for s in range(len(segment_of)):
        size = sizes[segment_of[s]]
        links[unsigned(s)] = heads[unsigned(size)]
        heads[unsigned(size)] = s
        add(low, high, size)
        long += 2 * size > budget
    return long


@jit
def _take_arrivals(sizes, state, budget, pool, segment_of, deferral_counts, buckets, out):
    """Take arrivals until the pool is full: each is emitted with a partner, or pooled in a slot.

    A slot whose segment was emitted has the deferral count -1; once the pool is empty, all slots
    are free again.
    """
    arrived, used, pooled, long, packs = state
    heads, links, low, high = buckets
    order, offsets = out
    end, half = offsets[packs], pool // 2
    scale = (budget << 32) // (PAIR_SLACK_DIVISOR * (pool - half))
    while pooled < pool and used < len(segment_of) and arrived < len(sizes):
        size = sizes[arrived]
        slack = ((pooled - half) * scale) >> 32 if pooled > half and 3 * long > pooled else 0
        partner = largest_within(low, budget - size, slack)
        if partner >= 0:
            s = heads[unsigned(partner)]
            heads[unsigned(partner)] = links[unsigned(s)]
            if links[unsigned(s)] < 0:
                discard(low, high, partner)
            order[end], order[end + 1] = segment_of[s], arrived
            end += 2
            packs += 1
            offsets[packs] = end
            deferral_counts[s] = -1
            pooled -= 1
            long -= 2 * partner > budget
            used = used if pooled else 0
        else:  # _insert_all, inlined: a call would cost more than the arrival
            links[unsigned(used)] = heads[unsigned(size)]
            heads[unsigned(size)] = used
            add(low, high, size)
            segment_of[used] = arrived
            deferral_counts[used] = 0
            used += 1
            pooled += 1
            long += 2 * size > budget
        arrived += 1
    return PoolState(arrived, used, pooled, long, packs)


@jit
def _build_trial_packs(buckets, deferral_counts, budget, probes, trial):
    """Move all segments from the buckets into trial packs, the longest first.

    Returns the number of packs, and how many of them, the first ones, have a long segment.
    """
    heads, links, low, high = buckets
    slots, ends, slack, deferrals = trial
    n = packs = num_long = 0
    opening = largest_at_most(low, high, budget)
    while opening >= 0:
        capacity = budget
        most_deferred = np.int64(0)
        size = opening
        second = np.int64(-1)
        while size >= 0:
            s = heads[unsigned(size)]
            heads[unsigned(size)] = links[unsigned(s)]
            if links[unsigned(s)] < 0:
                discard(low, high, size)
            slots[unsigned(n)] = s
            n += 1
            most_deferred = max(most_deferred, deferral_counts[unsigned(s)])
            capacity -= size
            if capacity == 0:
                break
            if second >= 0:
                size = second
                second = np.int64(-1)
            else:
                size = largest_at_most(low, high, capacity)
                if size < capacity < 2 * size:
                    first = _first_of_pair(capacity, size, probes, low, high, heads, links)
                    if first >= 0:
                        size = first
                        second = capacity - first
        slack[packs] = capacity
        deferrals[packs] = most_deferred
        packs += 1
        ends[packs] = n
        if 2 * opening > budget:
            num_long = packs
        opening = largest_at_most(low, high, opening)
    return packs, num_long


@jit
def _first_of_pair(capacity, largest, probes, low, high, heads, links):
    """Find the larger of two segments that fill the capacity exactly, or -1."""
    step = (2 * largest - capacity) // (2 * probes) + 1
    first = largest
    while 2 * first >= capacity:
        second = capacity - first
        if contains(low, second) and (second != first or links[heads[first]] >= 0):
            return first
        first = largest_at_most(low, high, first - step)
    return np.int64(-1)


@jit
def _slack_limit(slack, budget):
    """Choose the allowed slack: 0.5 % of the budget, or that of the fullest 30 % of the packs."""
    limit = budget // 200
    enough = (3 * len(slack) + 9) // 10
    full = 0
    for p in range(len(slack)):
        full += slack[p] <= limit
    if full >= enough:
        return limit
    shift = 0
    while budget >> shift > 255:
        shift += 1
    histogram = np.zeros(256, np.int64)
    for p in range(len(slack)):
        histogram[slack[p] >> shift] += 1
    bucket = 0
    full = histogram[0]
    while full < enough:
        bucket += 1
        full += histogram[bucket]
    return ((bucket + 1) << shift) - 1


@jit
def _emit_full_packs(segment_of, deferral_counts, trial, count, num_long, limit, out, packs):
    """Write the packs that are full enough, defer the others; return how many packs and segments.

    Packs after the first `num_long` have no long segment, and are emitted only after
    MAX_DEFERRALS.
    """
    slots, ends, slack, deferrals = trial
    order, offsets = out
    deferred = np.empty(ends[count], np.int64)
    deferred_counts = np.empty_like(deferred)
    stride = golden_stride(count)
    p = emitted = num_deferred = 0
    end = offsets[packs]
    for _ in range(count):
        full_enough = slack[p] < (limit + 1) * SLACK_GROWTH[deferrals[p]]
        if full_enough and (p < num_long or deferrals[p] == MAX_DEFERRALS):
            for j in range(ends[p], ends[p + 1]):
                order[end] = segment_of[slots[j]]
                end += 1
            emitted += 1
            offsets[packs + emitted] = end
        else:
            for j in range(ends[p], ends[p + 1]):
                deferred[num_deferred] = segment_of[slots[j]]
                deferred_counts[num_deferred] = deferral_counts[slots[j]] + 1
                num_deferred += 1
        p += stride
        if p >= count:
            p -= count
    segment_of[:num_deferred] = deferred[:num_deferred]
    deferral_counts[:num_deferred] = deferred_counts[:num_deferred]
    return emitted, num_deferred
