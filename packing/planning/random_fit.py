"""Random fit: full packs of segments that meet by chance, for one window of segments.

    longest segment left      opens a pack                                 [ 61        ]
    next arrivals             join it while there is room for several      [ 61 9      ]
    an arrival and a partner  that together leave nothing                  [ 61 9 17 13]

Best-fit decreasing looks at lengths alone: in every epoch it puts the same documents together.
Here chance decides who joins, and length only who comes first and who comes last, so packs are
nearly as full and differ between epochs. There is no generator: what is random is the order of
arrival, which the seed and the epoch shuffle, and a hash of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..numba_jit import jit
from .bitset import add, contains, discard, empty_bitset, largest_at_most, unsigned

PROBES = 8
"""Arrivals tried until one fits, or has a partner that fills the pack."""
ROOM_FOR_SEVERAL = 3
"""While a pack has room for this many mean segments, any segment that fits may join."""


class Window(NamedTuple):
    """The segments of a window, twice: as they arrived, and by rank, the shortest first."""

    sizes: Any
    """int64 [n]: sizes in order of arrival."""
    ranks: Any
    """int64 [n]: the rank of each arrival."""
    arrivals: Any
    """int64 [n]: the arrival at each rank."""
    sorted_sizes: Any
    """int64 [n]: the size at each rank."""
    below: Any
    """int64 [capacity + 2]: how many segments are smaller than each size."""
    ranks_low: Any
    ranks_high: Any
    """The bitset of ranks without a pack."""
    arrivals_low: Any
    arrivals_high: Any
    """The bitset of arrivals without a pack."""


@jit
def random_fit(sizes, capacity, tolerance, longest_first, pairs_first, salt):
    """Put all segments of a window into packs.

    A pack is full if at most `tolerance` is unused. longest_first: every pack is opened by the
    longest segment, also if it is short; else any arrival opens one. pairs_first: start with pairs
    that fill a pack exactly, and add no segment without looking for its partner; fuller where packs
    are mostly pairs. salt: another one gives other packs. Returns the segments of the packs, their
    offsets, and the unused capacity of each.
    """
    n = len(sizes)
    key = mix(hash_sizes(sizes) + np.uint64(salt))
    window = _sort(sizes, capacity)
    order, offsets = np.empty(n, np.int64), np.zeros(n + 1, np.int64)
    slack = np.empty(n, np.int64)
    packs = _pair_exactly(window, capacity, key, order, offsets, slack) if pairs_first else 0
    packed = offsets[packs]
    tokens = sizes.sum() - packs * capacity
    cursor = np.int64(key % np.uint64(n))
    rank = opener = largest_at_most(window.ranks_low, window.ranks_high, n - 1)
    while rank >= 0:
        room = capacity
        joined, partner = opener, np.int64(-1)
        noise = mix(key + np.uint64(opener))
        while joined >= 0:
            _remove(window, joined)
            size = window.sorted_sizes[joined]
            order[packed] = window.arrivals[joined]
            packed += 1
            tokens -= size
            room -= size
            if partner >= 0:
                joined, partner = partner, np.int64(-1)
            elif room == 0 or packed == n:
                break
            else:
                several = not pairs_first and room * (n - packed) > ROOM_FOR_SEVERAL * tokens
                noise = mix(noise)
                joined, partner, cursor = _choose(window, room, tolerance, several, cursor, noise)
        slack[packs] = room
        packs += 1
        offsets[packs] = packed
        rank = largest_at_most(window.ranks_low, window.ranks_high, rank)
        short = rank >= 0 and ROOM_FOR_SEVERAL * window.sorted_sizes[rank] <= capacity
        if short and not longest_first:
            cursor = _next_arrival(window, cursor)
            opener = window.ranks[cursor]
        else:
            opener = rank
    return order, offsets[: packs + 1], slack[:packs]


@jit
def _pair_exactly(window, capacity, key, order, offsets, slack):
    """Write the packs of two segments that fill one exactly; return how many there are."""
    packs = 0
    for arrival in range(len(order)):
        partner = _exact_partner(window, arrival, capacity, mix(key + np.uint64(arrival)))
        if partner >= 0:
            _remove(window, window.ranks[arrival])
            _remove(window, partner)
            order[2 * packs], order[2 * packs + 1] = arrival, window.arrivals[partner]
            slack[packs] = 0
            packs += 1
            offsets[packs] = 2 * packs
    return packs


@jit
def hash_sizes(sizes):
    """Hash the sizes in their order of arrival."""
    key = np.uint64(len(sizes))
    for size in sizes:
        key = mix(key + np.uint64(size))
    return key


@jit
def mix(value):
    """Hash 64 bits (the finalizer of splitmix64)."""
    z = value * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@jit
def _sort(sizes, capacity):
    """Sort the sizes by counting. Equal ones in an order that does not follow their arrival."""
    n = len(sizes)
    below = np.zeros(capacity + 2, np.int64)
    for size in sizes:
        below[unsigned(size + 1)] += 1
    for size in range(1, capacity + 2):
        below[size] += below[size - 1]
    free = below[:-1].copy()
    ranks, arrivals = np.empty(n, np.int64), np.empty(n, np.int64)
    sorted_sizes = np.empty(n, np.int64)
    stride, arrival = golden_stride(n), 0
    for _ in range(n):
        size = sizes[unsigned(arrival)]
        rank = free[unsigned(size)]
        free[unsigned(size)] = rank + 1
        ranks[unsigned(arrival)], arrivals[unsigned(rank)] = rank, arrival
        sorted_sizes[unsigned(rank)] = size
        arrival += stride
        if arrival >= n:
            arrival -= n
    ranks_low, ranks_high = empty_bitset(n)
    arrivals_low, arrivals_high = empty_bitset(n)
    for i in range(n):
        add(ranks_low, ranks_high, i)
        add(arrivals_low, arrivals_high, i)
    return Window(
        sizes,
        ranks,
        arrivals,
        sorted_sizes,
        below,
        ranks_low,
        ranks_high,
        arrivals_low,
        arrivals_high,
    )


@jit
def golden_stride(n):
    """Choose a stride near the golden section that visits all of n, so that neighbours differ."""
    stride = max(1, int(n * 0.618))
    while np.gcd(stride, n) > 1:
        stride += 1
    return stride


@jit
def _remove(window, rank):
    discard(window.ranks_low, window.ranks_high, rank)
    discard(window.arrivals_low, window.arrivals_high, window.arrivals[rank])


@jit
def _exact_partner(window, arrival, capacity, noise):
    """Choose a segment that fills a pack together with this one; return its rank, or -1."""
    room = capacity - window.sizes[arrival]
    if room == 0 or not contains(window.arrivals_low, arrival):
        return np.int64(-1)
    return _any_within(window, room, room, noise, window.ranks[arrival])


@jit
def _choose(window, room, tolerance, several, cursor, noise):
    """Choose who joins a pack: a rank and that of its partner, each or both -1; and the cursor."""
    nobody = np.int64(-1)
    if window.below[unsigned(room + 1)] == 0:
        return nobody, nobody, cursor
    for _ in range(PROBES):
        cursor = _next_arrival(window, cursor)
        left = room - window.sizes[cursor]
        if left < 0:
            continue
        rank = window.ranks[cursor]
        if several or left <= tolerance:
            return rank, nobody, cursor
        partner = _any_within(window, left - tolerance, left, mix(noise + np.uint64(cursor)), rank)
        if partner >= 0:
            return rank, partner, cursor
    largest = _largest(window, room)
    if largest < 0:
        return nobody, nobody, cursor
    if room - window.sorted_sizes[largest] <= tolerance:
        return _any_within(window, room - tolerance, room, noise, nobody), nobody, cursor
    rank, partner = _pair_within(window, room, tolerance, largest)
    return rank, partner, cursor


@jit
def _largest(window, size):
    """Return the highest rank without a pack of at most this size, or -1."""
    count = window.below[unsigned(size + 1)]
    return largest_at_most(window.ranks_low, window.ranks_high, count - 1) if count else count - 1


@jit
def _next_arrival(window, cursor):
    """Return the arrival without a pack before the cursor; before the first, the last."""
    if cursor > 0:
        arrival = largest_at_most(window.arrivals_low, window.arrivals_high, cursor - 1)
        if arrival >= 0:
            return arrival
    return largest_at_most(window.arrivals_low, window.arrivals_high, len(window.sizes) - 1)


@jit
def _any_within(window, smallest, largest, noise, excluded):
    """Return any rank without a pack whose size is in this range, but the excluded one; or -1."""
    first = window.below[unsigned(max(smallest, 0))]
    last = window.below[unsigned(largest + 1)] - 1
    if last < first:
        return np.int64(-1)
    start = first + np.int64(
        ((noise >> np.uint64(32)) * np.uint64(last - first + 1)) >> np.uint64(32)
    )
    for bound in (start, last):
        rank = largest_at_most(window.ranks_low, window.ranks_high, bound)
        if rank == excluded and rank > 0:
            rank = largest_at_most(window.ranks_low, window.ranks_high, rank - 1)
        if rank >= first and rank != excluded:
            return rank
    return np.int64(-1)


@jit
def _pair_within(window, room, tolerance, largest):
    """Find two that fill the room, trying from the largest down; else the largest alone."""
    rank = largest
    for _ in range(PROBES):
        size = window.sorted_sizes[rank]
        if 2 * size < room or rank == 0:
            break
        partner = _largest(window, room - size)
        if partner >= rank:
            partner = largest_at_most(window.ranks_low, window.ranks_high, rank - 1)
        if partner >= 0 and room - size - window.sorted_sizes[partner] <= tolerance:
            return rank, partner
        rank = largest_at_most(window.ranks_low, window.ranks_high, rank - 1)
        if rank < 0:
            break
    return largest, np.int64(-1)
