"""Best fit over a small pool: the fullest packs go out, the others go back and wait.

    arrivals ─▶ pool ─▶ a trial pack for every segment ─▶ full enough? ─▶ out
                 ▲                                             │ no
                 └─────────────────────────────────────────────┘

A round happens whenever the pool is full. The longest segment opens a trial pack, the largest
that fits comes next, and where a pair fills the rest exactly, the pair. Long segments choose
first, so what is hard to place has the whole pool to choose from, round after round.

A pack is full enough if it lacks at most 0.5 % of the budget, or belongs to the fullest 40 % of
its round. Each time a segment is put back its next pack may lack half as much again, so after
PATIENCE times any pack will do (0.5 % · 1.5^14 > 100 %): a segment sees at most 15 rounds, and a
round comes at the latest after `pool` arrivals. What a round does depends on the pool alone, so
the packs do not depend on how the arrivals were cut into calls.
"""

from __future__ import annotations

import numpy as np

from .bitset import add, at, contains, discard, empty_bitset, largest_at_most
from .compiled import compiled

PATIENCE = 14
"""How often a segment may be put back."""
PROBES, PROBES_OF_MANY, MANY = 4, 2, 4096
"""Pairs tried, from the most unequal to the most equal, for one that fills a pack exactly.

More would fill more packs exactly, and use up the short segments that the long ones need; the
larger the pool, the more often a pair is found. On hard mixes these leave 0.2 to 6 points less
empty than best-fit decreasing, whatever the pool; sixteen pairs would leave up to 1 point more."""
ALLOWANCE = 1.5 ** np.arange(PATIENCE + 1)
"""By what factor a pack may be less full when its most patient segment was put back n times."""


@compiled
def best_fit(places, waits, budget, pool, final):
    """Pack segments of these places (rounded lengths), given in order of arrival.

    `waits` says how often each of the first ones was put back. Gives the segments of the packs
    that go out, the offsets of these packs, the segments held back and their waits.
    """
    n = len(places)
    order = np.empty(n, np.int64)
    offsets = np.zeros(n + 1, np.int64)
    held = np.empty(pool, np.int64)
    wait = np.zeros(pool, np.int64)
    trial = np.empty(pool, np.int64), np.zeros(pool + 1, np.int64)
    slack = np.empty(pool, np.int64)
    oldest = np.empty(pool, np.int64)
    lists = np.full(budget + 1, -1, np.int32), np.empty(pool, np.int32)
    levels = empty_bitset(budget)
    probes = PROBES if pool <= MANY else PROBES_OF_MANY
    wait[: len(waits)] = waits
    packs = m = source = 0
    while True:
        while m < pool and source < n:
            held[m] = source
            source += 1
            m += 1
        last = final and source == n
        if m == 0 or (m < pool and not last):
            break
        spots = places, held[:m], wait
        k = _trial_packs(spots, budget, probes, lists, levels, trial, slack, oldest)
        limit = budget if last else _slack_limit(slack[:k], budget)
        leaving, m = _let_go(held, wait, trial, slack[:k], oldest, limit, order, offsets, packs)
        packs += leaving
    return order[: offsets[packs]], offsets[: packs + 1], held[:m].copy(), wait[:m].copy()


@compiled
def _trial_packs(spots, budget, probes, lists, levels, trial, slack, oldest):
    """Give every held segment a trial pack; gives the number of packs."""
    places, held, wait = spots
    heads, links = lists
    low, high = levels
    slots, ends = trial
    for s in range(len(held) - 1, -1, -1):
        place = places[held[s]]
        links[at(s)] = heads[at(place)]
        heads[at(place)] = s
        add(low, high, place)
    n = packs = 0
    opening = largest_at_most(low, high, budget)
    while opening >= 0:
        room = budget
        age = np.int64(0)
        place = opening
        pair = np.int64(-1)
        while place >= 0:
            s = heads[at(place)]
            heads[at(place)] = links[at(s)]
            if links[at(s)] < 0:
                discard(low, high, place)
            slots[at(n)] = s
            n += 1
            age = max(age, wait[at(s)])
            room -= place
            if room == 0:
                break
            if pair >= 0:
                place = pair
                pair = np.int64(-1)
            else:
                place = largest_at_most(low, high, room)
                if place < room < 2 * place:
                    first = _first_of_pair(room, place, probes, low, high, heads, links)
                    if first >= 0:
                        place = first
                        pair = room - first
        slack[packs] = room
        oldest[packs] = age
        packs += 1
        ends[packs] = n
        opening = largest_at_most(low, high, opening)
    return packs


@compiled
def _first_of_pair(room, largest, probes, low, high, heads, links):
    """Find the larger of two segments that fill the room exactly, or -1."""
    step = (2 * largest - room) // (2 * probes) + 1
    first = largest
    while 2 * first >= room:
        second = room - first
        if contains(low, second) and (second != first or links[heads[first]] >= 0):
            return first
        first = largest_at_most(low, high, first - step)
    return np.int64(-1)


@compiled
def _slack_limit(slack, budget):
    """Choose what a pack may lack: 0.5 % of the budget, or what the fullest 40 % lack."""
    limit = budget // 200
    enough = (2 * len(slack) + 4) // 5
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


@compiled
def _let_go(held, wait, trial, slack, oldest, limit, order, offsets, packs):
    """Write the packs that go out, put the others back; gives how many went and stayed."""
    slots, ends = trial
    back = np.empty(ends[len(slack)], np.int64)
    back_wait = np.empty_like(back)
    stride = _golden_stride(len(slack))
    p = leaving = stay = 0
    done = offsets[packs]
    for _ in range(len(slack)):
        if slack[p] < (limit + 1) * ALLOWANCE[oldest[p]]:
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
    wait[:] = 0
    wait[:stay] = back_wait[:stay]
    return leaving, stay


@compiled
def _golden_stride(packs):
    """Choose steps that visit all packs so that neighbours differ: near the golden section."""
    stride = max(1, int(packs * 0.618))
    while np.gcd(stride, packs) > 1:
        stride += 1
    return stride
