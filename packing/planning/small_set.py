"""A small set, planned at once: the fewest packs of several attempts, then exchanged at random.

    attempt 1, 2, ... ─▶ fewest packs ─▶ move, swap, move, swap ... ─▶ as many packs, others in them

In a small set one pack counts, and only a few segments fill a room exactly: `random_fit` would put
the same ones together in every epoch. Exchanges keep the number of packs; only where few documents
share a pack, one pack in 200 is added for them (SPARE). It takes microseconds a segment, too long
for large sets, which have more choice anyway.
"""

from __future__ import annotations

import numpy as np

from ..numba_jit import jit
from .random_fit import below, mix, random_fit

ATTEMPTS = 16
"""Further orders of arrival tried while fewer packs are possible."""
EXCHANGES, NEAR = 64, 10
"""Exchanges tried for each segment; a swap is with one of the NEAR next longer or shorter ones."""
SPARE, FEW_PER_PACK, NO_SPARE_FROM = 200, 3.25, 2000
"""One empty pack in SPARE is added where packs have fewer than FEW_PER_PACK segments on average:
full pairs can hardly be exchanged. Sets of NO_SPARE_FROM segments have none."""


@jit
def fit_small_set(sizes, capacity, heads, counts, low, high, order, offsets, lacks):
    """Put all segments into packs, as `random_fit` does; what packs lack is not known."""
    buckets = (heads, counts, low, high)
    n, fewest = len(sizes), -(-sizes.sum() // capacity)
    packs, key = random_fit(sizes, capacity, *buckets, order, offsets, lacks)
    trial_order, trial_offsets = np.empty_like(order), np.zeros_like(offsets)
    attempt = 0
    while packs > fewest and attempt < ATTEMPTS:
        attempt += 1
        arrivals = _shuffled(n, mix(key + np.uint64(attempt)))
        trial = (trial_order, trial_offsets, lacks)
        found = random_fit(sizes[arrivals], capacity, *buckets, *trial)[0]
        if found < packs:
            packs = found
            for i in range(n):
                order[i] = arrivals[trial_order[i]]
            for p in range(packs + 1):
                offsets[p] = trial_offsets[p]
    spare = packs // SPARE if n < min(FEW_PER_PACK * packs, NO_SPARE_FROM) else 0
    return _exchange(sizes, capacity, order, offsets, packs, spare, mix(key)), key


@jit
def _shuffled(n, key):
    shuffled = np.arange(n)
    for i in range(n):
        key = mix(key)
        other = i + below(key, n - i)
        shuffled[i], shuffled[other] = shuffled[other], shuffled[i]
    return shuffled


@jit
def _exchange(sizes, capacity, order, offsets, packs, spare, key):
    """Move segments to other packs and swap those of similar size; return the number of packs."""
    n = len(sizes)
    place, rooms = np.empty(n, np.int64), np.full(packs + spare, capacity)
    for p in range(packs):
        for i in range(offsets[p], offsets[p + 1]):
            place[order[i]] = p
            rooms[p] -= sizes[order[i]]
    by_size, rank = np.empty(n, np.int64), np.empty(n, np.int64)
    for s in range(n):
        by_size[s] = sizes[s] * n + s
    by_size.sort()  # by size, then by number, as a stable argsort, which takes seconds to compile
    for i in range(n):
        by_size[i] %= n
        rank[by_size[i]] = i
    for step in range(EXCHANGES * n):
        noise = mix(key + np.uint64(step))
        s, second = below(noise, n), noise << np.uint64(32)
        p = place[s]
        if step & 1:
            q = below(second, packs + spare)
            if q != p and sizes[s] <= rooms[q]:
                place[s] = q
                rooms[p] += sizes[s]
                rooms[q] -= sizes[s]
        else:
            other = rank[s] + below(second, 2 * NEAR + 1) - NEAR
            if 0 <= other < n:
                t = by_size[other]
                q, growth = place[t], sizes[t] - sizes[s]
                if q != p and -rooms[q] <= growth <= rooms[p]:
                    place[s], place[t] = q, p
                    rooms[p] -= growth
                    rooms[q] += growth
    return _collect(place, packs + spare, order, offsets)


@jit
def _collect(place, packs, order, offsets):
    """Write the packs that are not empty; return their number."""
    ends = np.zeros(packs + 1, np.int64)
    for p in place:
        ends[p + 1] += 1
    ends = np.cumsum(ends)
    kept = 0
    for p in range(packs):
        if ends[p + 1] > ends[p]:
            kept += 1
            offsets[kept] = ends[p + 1]
    for s in range(len(place)):
        order[ends[place[s]]] = s
        ends[place[s]] += 1
    return kept
