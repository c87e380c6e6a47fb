"""Best fit over a small pool: the fullest packs go out, the others go back and wait.

    arrivals ─▶ pool ──▶ a trial pack for every segment ──▶ fullest packs ─▶ out
                 ▲       (largest first, then the                │
                 │        largest that fits, and an              │ the rest
                 └────────exact pair to finish) ◀────────────────┘

A round happens whenever the pool is full. Long segments choose their company first, so what is
hard to place has the whole pool to choose from, round after round; only a pack that is full
enough leaves. A segment that was put back `patience` times leaves in the next round whatever its
pack looks like: the delay is bounded. What a round does depends on the pool alone, so the packs
do not depend on how the arrivals were cut into calls.
"""

from __future__ import annotations

import numpy as np

from .bitset import add, contains, discard, empty_bitset, largest_at_most
from .compiled import compiled

PATIENCE = 31
"""Rounds a segment may be put back."""
PROBES = 16
"""Pairs tried in search of an exact end of a pack."""


@compiled
def best_fit(places, waits, budget, pool, final):
    """Pack segments of these places (rounded lengths), given in order of arrival.

    `waits` says how often each was put back so far. Gives the segments of the packs that go out,
    the offsets of these packs, the segments held back, and how often those were put back.
    """
    n = len(places)
    order = np.empty(n, np.int64)
    offsets = np.zeros(n + 1, np.int64)
    waits = waits.copy()
    held = np.empty(pool, np.int64)
    low, high = empty_bitset(budget)
    heads = np.full(budget + 1, -1, np.int32)
    links = np.empty(pool, np.int32)
    pack_of = np.empty(pool, np.int32)
    slack = np.empty(pool, np.int64)
    number = np.empty(pool, np.int64)
    done = packs = m = source = 0
    while True:
        fresh = min(pool - m, n - source)
        held[m : m + fresh] = np.arange(source, source + fresh)
        source += fresh
        m += fresh
        last = final and source == n
        if m == 0 or (m < pool and not last):
            break
        trial = _trial_packs(places, held[:m], budget, low, high, heads, links, pack_of, slack)
        limit = budget if last else _slack_limit(slack[:trial], budget)
        leaving = _number_packs(held[:m], waits, pack_of, slack, limit, number[:trial])
        m = _let_go(held[:m], waits, pack_of, number, leaving, order, done, offsets, packs)
        packs += leaving
        done = offsets[packs]
    return order[:done], offsets[: packs + 1], held[:m].copy(), waits[held[:m]]


@compiled
def _trial_packs(places, held, budget, low, high, heads, links, pack_of, slack):
    """Give every held segment a trial pack; long segments choose first."""
    for s in range(len(held) - 1, -1, -1):  # newest first, so that the oldest heads its list
        place = places[held[s]]
        links[s] = heads[place]
        heads[place] = s
        add(low, high, place)
    packs = 0
    place = largest_at_most(low, high, budget)
    while place >= 0:
        room = budget
        pair = np.int64(-1)
        while place >= 0:
            s = heads[place]
            heads[place] = links[s]
            if links[s] < 0:
                discard(low, high, place)
            pack_of[s] = packs
            room -= place
            if room == 0:
                break
            if pair >= 0:
                place = pair
                pair = np.int64(-1)
            else:
                place, pair = _next_segments(room, low, high, heads, links)
        slack[packs] = room
        packs += 1
        place = largest_at_most(low, high, budget)
    return packs


@compiled
def _next_segments(room, low, high, heads, links):
    """Choose the largest that fits, or a pair that fills the room exactly."""
    largest = largest_at_most(low, high, room)
    if largest < 0 or largest == room:
        return largest, np.int64(-1)
    first = largest
    for _ in range(PROBES):
        second = room - first
        if second > first:
            break
        if contains(low, second) and (second != first or links[heads[first]] >= 0):
            return first, second
        first = largest_at_most(low, high, first - 1)
        if first < 0:
            break
    return largest, np.int64(-1)


@compiled
def _slack_limit(slack, budget):
    """Choose how empty a pack that goes out may be: a quarter of the packs go out at least."""
    limit = budget // 500
    enough = (len(slack) + 3) // 4
    if np.sum(slack <= limit) >= enough:
        return limit
    return np.sort(slack)[enough - 1]


@compiled
def _number_packs(held, waits, pack_of, slack, limit, number):
    """Number the packs that go out by their oldest segment; -1 for those that go back."""
    number[:] = -2
    for s in range(len(held)):
        if slack[pack_of[s]] <= limit or waits[held[s]] >= PATIENCE:
            number[pack_of[s]] = -1
    leaving = 0
    for s in range(len(held)):
        if number[pack_of[s]] == -1:
            number[pack_of[s]] = leaving
            leaving += 1
    return leaving


@compiled
def _let_go(held, waits, pack_of, number, leaving, order, done, offsets, packs):
    """Write the packs that go out, segments in order of arrival; put the others back."""
    ends = np.zeros(leaving + 1, np.int64)
    for s in range(len(held)):
        if number[pack_of[s]] >= 0:
            ends[number[pack_of[s]] + 1] += 1
    ends[0] = done
    for p in range(leaving):
        ends[p + 1] += ends[p]
        offsets[packs + p + 1] = ends[p + 1]
    back = 0
    for s in range(len(held)):
        p = number[pack_of[s]]
        if p >= 0:
            order[ends[p]] = held[s]
            ends[p] += 1
        else:
            held[back] = held[s]
            waits[held[back]] += 1
            back += 1
    return back
