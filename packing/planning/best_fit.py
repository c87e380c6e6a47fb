"""Best fit over a small pool: what fills a pack goes out, the rest waits for something better.

    arrivals ─▶ fills a pack with one of the pool? ─ yes ─▶ out
                  │ no
                  ▼
                 pool ── full ─▶ a trial pack for every segment ─▶ full enough? ─▶ out
                  ▲                                                    │ no
                  └────────────────────────────────────────────────────┘

An arrival leaves at once with a segment that waits if the two fill a pack. Where long segments
make up a good part of the pool, so that most packs are pairs, a pack of two may lack a little:
nothing up to a pool half full, then more and more up to 0.25 % of the budget. The pool so stays
nearly full, and only the best of its pairs leave.

A round happens when the pool is full, at the latest after 4 · `pool` arrivals: everything goes into
trial packs (see `trial_packs`), long segments first, so what is hard to place has the whole pool to
choose from. A pack is full enough if it lacks at most 0.5 % of the budget, or belongs to the
fullest 30 % of its round. While the pool holds many segments longer than half a pack, packs
without one stay: the short segments are what the long ones wait for.

Each time a segment is put back its next pack may lack half as much again, so after PATIENCE times
any pack will do (0.5 % · 1.5^14 > 100 %): a segment sees at most 15 rounds. What happens depends on
the pool and the arrivals since the last round alone, so the packs do not depend on how the
arrivals were cut into calls.
"""

from __future__ import annotations

import numpy as np

from ..jit import jit
from .bitset import add, at, discard, empty_bitset, largest_within
from .trial_packs import trial_packs

PATIENCE = 14
"""How often a segment may be put back."""
LAPS = 4
"""Pools of arrivals after which a round comes even though the pool is not full."""
PROBES, PROBES_OF_MANY, MANY = 4, 2, 4096
"""Pairs tried, from the most unequal to the most equal, for one that fills a pack exactly.

More would fill more packs exactly, and use up the short segments that the long ones need; the
larger the pool, the more often a pair is found. On hard mixes these leave 0.2 to 6 points less
empty than best-fit decreasing, whatever the pool; sixteen pairs would leave up to 1 point more."""
ALLOWANCE = 1.5 ** np.arange(PATIENCE + 1)
"""By what factor a pack may be less full when its most patient segment was put back n times."""
LOOSE = 400
"""A pair may lack one part in so many of the budget when the pool is full."""


@jit
def best_fit(places, waits, since, budget, pool, final):
    """Pack segments of these places (rounded lengths), given in order of arrival.

    `waits` says how often each of the first ones was put back, for those that were looked at
    before; `since` how many slots are used since the last round. Gives the segments of the packs
    that go out, the offsets of these packs, the segments held back, their waits and `since`.
    """
    n, slots = len(places), LAPS * pool
    out = np.empty(n, np.int64), np.zeros(n + 1, np.int64)
    held, wait = np.arange(slots), np.zeros(slots, np.int64)
    packed = np.empty(pool, np.int64), np.zeros(pool + 1, np.int64)
    slack, oldest = np.empty(pool, np.int64), np.empty(pool, np.int64)
    lists = np.full(budget + 1, -1, np.int32), np.empty(slots, np.int32)
    levels = empty_bitset(budget)
    probes = PROBES if pool <= MANY else PROBES_OF_MANY
    source = m = len(waits)
    packs, used = 0, since
    wait[:m], wait[m:used] = waits, -1
    long = _file(places, held[:m], budget, lists, levels)
    while True:
        at_hand = source, used, m, long, packs
        at_hand = _arrive(places, at_hand, budget, pool, held, wait, lists, levels, out)
        source, used, m, long, packs = at_hand
        last = final and source == n
        if m == 0 or (m < pool and used < slots and not last):
            break
        k, halves = trial_packs(lists, levels, wait, budget, probes, packed, slack, oldest)
        if last or 5 * long <= 2 * m:
            halves = k
        limit = budget if last else _slack_limit(slack[:halves], budget)
        may_lack = slack[:k], oldest, limit, halves
        leaving, m = _let_go(held, wait, packed, may_lack, out, packs)
        packs, used = packs + leaving, m
        long = _file(places, held[:m], budget, lists, levels)
    order, offsets = out
    left = np.flatnonzero(wait[:used] >= 0)
    return order[: offsets[packs]], offsets[: packs + 1], held[left], wait[left], used


@jit
def _file(places, held, budget, lists, levels):
    """Put the segments of the first slots into their lists; gives how many are long."""
    heads, links = lists
    low, high = levels
    long = 0
    for s in range(len(held)):
        place = places[held[s]]
        links[at(s)] = heads[at(place)]
        heads[at(place)] = s
        add(low, high, place)
        long += 2 * place > budget
    return long


@jit
def _arrive(places, at_hand, budget, pool, held, wait, lists, levels, out):
    """Take arrivals until the pool is full: each leaves with a partner, or is filed in a slot.

    A slot that was left carries the wait -1; with the last, all slots are free again.
    """
    source, used, m, long, packs = at_hand
    heads, links = lists
    low, high = levels
    order, offsets = out
    done, half = offsets[packs], pool // 2
    scale = (budget << 32) // (LOOSE * (pool - half))
    while m < pool and used < len(held) and source < len(places):
        place = places[source]
        loose = ((m - half) * scale) >> 32 if m > half and 3 * long > m else 0
        partner = largest_within(low, budget - place, loose)
        if partner >= 0:
            s = heads[at(partner)]
            heads[at(partner)] = links[at(s)]
            if links[at(s)] < 0:
                discard(low, high, partner)
            order[done], order[done + 1] = held[s], source
            done += 2
            packs += 1
            offsets[packs] = done
            wait[s] = -1
            m -= 1
            long -= 2 * partner > budget
            used = used if m else 0
        else:  # filed as in _file, written out: a call would cost more than the arrival
            links[at(used)] = heads[at(place)]
            heads[at(place)] = used
            add(low, high, place)
            held[used] = source
            wait[used] = 0
            used += 1
            m += 1
            long += 2 * place > budget
        source += 1
    return source, used, m, long, packs


@jit
def _slack_limit(slack, budget):
    """Choose what a pack may lack: 0.5 % of the budget, or what the fullest 30 % lack."""
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
def _let_go(held, wait, packed, may_lack, out, packs):
    """Write the packs that go out, put the others back; gives how many went and stayed.

    Packs behind the first `halves` hold no long segment, and leave only when patience is over.
    """
    slots, ends = packed
    slack, oldest, limit, halves = may_lack
    order, offsets = out
    back = np.empty(ends[len(slack)], np.int64)
    back_wait = np.empty_like(back)
    stride = _golden_stride(len(slack))
    p = leaving = stay = 0
    done = offsets[packs]
    for _ in range(len(slack)):
        leaves = slack[p] < (limit + 1) * ALLOWANCE[oldest[p]]
        if leaves and (p < halves or oldest[p] == PATIENCE):
            for j in range(ends[p], ends[p + 1]):
                order[done] = held[slots[j]]
                done += 1
            leaving += 1
            offsets[packs + leaving] = done
        else:
            for j in range(ends[p], ends[p + 1]):
                back[stay] = held[slots[j]]
                back_wait[stay] = wait[slots[j]] + 1
                stay += 1
        p += stride
        if p >= len(slack):
            p -= len(slack)
    held[:stay] = back[:stay]
    wait[:stay] = back_wait[:stay]
    return leaving, stay


@jit
def _golden_stride(packs):
    """Choose steps that visit all packs so that neighbours differ: near the golden section."""
    stride = max(1, int(packs * 0.618))
    while np.gcd(stride, packs) > 1:
        stride += 1
    return stride
