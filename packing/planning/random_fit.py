"""Random fit: full packs of segments that meet by chance.

    a long segment, or any            opens a pack                                 [ 61        ]
    any that fit                      join it while there is room for several      [ 61 9      ]
    any with a partner                that together leave nothing                  [ 61 9 17 13]

Best-fit decreasing looks at lengths alone: in every epoch it puts the same documents together.
Here chance decides who joins, and length only who comes first and who comes last, so packs are
nearly as full and differ between epochs. A long segment, over half a pack, that has room for one
more takes any that leaves at most `tolerance`: these pairs would else be the same in every epoch.
Where only a few fit at all, it stays alone.

The loop is one function: numba counts references to arrays at each call, which takes twice as long.
There is no generator: what is random is the order of arrival, which the seed and the epoch shuffle,
and a hash of it.
"""

from __future__ import annotations

import numpy as np

from ..numba_jit import jit
from .bitset import add, contains, discard, empty_bitset, largest_at_most, unsigned

PROBES = 8
"""Arrivals tried until one fits, or has a partner that fills the pack."""
ROOM_FOR_SEVERAL, ROOM_FOR_TWO = 12, 6
"""Quarters: where this many mean segments of those that fit find room, any joins; any with a
partner joins. Where fewer do, the one that fits best."""
CHANCE, LARGEST_TOLERANCE = 600, 1 / 16
"""The tolerance of pairs, as a part of the capacity: 1 / CHANCE if every pack has a long segment,
six times that if every second has one. Pairs cost little fill where there are few."""
NARROW, SHORT_ONLY = 8, 1.25
"""A room below capacity / NARROW takes any that leaves at most half of it, if there are more than
SHORT_ONLY packs for each long segment: else the few that fill it would do so in every epoch."""
FEW, FEW_WITHIN = 16, 8
"""A long segment stays alone if fewer than FEW fit its room, and that is less than FEW_WITHIN
tolerances: else it would meet the same few in every epoch."""
SMALL_SET = 128
"""Of fewer segments each pack counts: pairs have no tolerance, and segments over a third of a pack
come first. The same holds where a pack has five mean segments or more: chance needs no more."""
MAX_BUCKETS = 1 << 16
"""Sizes are told apart up to this many; above, several share a bucket."""
BINS, UPDATES = 64, 4
"""The mean of those that fit is known for this many rooms, and updated so often."""


@jit
def bucket_shift(capacity):
    """Return the shift from a size to its bucket: 0 unless sizes share one."""
    shift = 0
    while capacity >> shift >= MAX_BUCKETS:
        shift += 1
    return shift


@jit
def empty_buckets(capacity):
    """Return the segments without a pack by size, none yet, for sizes up to a capacity.

    Two int32 [buckets], the latest segment of each bucket (or -1) and how many there are, and the
    bitset of the buckets that are not empty.
    """
    largest = (capacity >> bucket_shift(capacity)) + 1
    heads, counts = np.full(largest + 1, -1, np.int32), np.zeros(largest + 1, np.int32)
    low, high = empty_bitset(largest)
    return heads, counts, low, high


@jit
def random_fit(sizes, capacity, heads, counts, low, high, order, offsets, lacks):
    """Put all segments into packs; the buckets are empty before and after.

    Writes the packs and what each lacks; returns the number of packs and a hash of the sizes.
    """
    n, shift, bin_shift = len(sizes), bucket_shift(capacity), bin_shift_of(capacity)
    links, rest, packed = np.empty(n, np.int32), np.arange(n), np.zeros(n, np.bool_)
    key, tolerance, narrow = _insert_all(sizes, capacity, shift, links, heads, counts, low, high)
    means, longest = np.empty(BINS, np.int64), capacity >> shift
    opening = (capacity // 2 if tolerance else capacity // 3) >> shift
    least_room = min(_room_of_few(counts) << shift, FEW_WITHIN * tolerance)
    packs, placed, cursor, end, next_update = 0, 0, 0, n, 0
    while placed < n:
        if placed >= next_update:
            _update_means(sizes, packed, bin_shift, means)
            next_update += n // UPDATES + 1
        longest = largest_at_most(low, high, longest)
        room, start, pair_slack = capacity, placed, tolerance
        while room > 0 and placed < n:
            mean = means[unsigned(room >> bin_shift)] if placed > start else 0
            several, largest = 4 * room > ROOM_FOR_SEVERAL * mean, longest
            probes = PROBES if 4 * room > ROOM_FOR_TWO * mean else 0
            if placed > start:
                largest = largest_at_most(low, high, room >> shift)
                if largest < 0 or (placed == start + 1 and room < least_room):
                    break
            elif longest > opening:
                probes = 0
            slack = max(tolerance, room // 2 if room < narrow else 0) if placed == start + 1 else 0
            pair_slack = max(slack, pair_slack)
            s, joins, left = np.int64(0), False, room
            while probes > 0:
                if cursor == end:
                    cursor, end = 0, _compact(rest, packed, end)
                s = rest[unsigned(cursor)]
                cursor += 1
                if packed[unsigned(s)]:
                    continue
                probes -= 1
                left = room - sizes[unsigned(s)]
                if left >= 0 and (several or left <= slack or contains(low, left >> shift)):
                    joins = True
                    break
            if joins:
                room = left
                _remove(s, sizes, shift, packed, heads, counts, low, high)
                order[unsigned(placed)], placed = s, placed + 1
                if several or left <= slack or not contains(low, left >> shift):
                    continue
                largest = left >> shift  # the partner
            elif slack > 0:
                noise = mix(key + np.uint64(placed))
                largest = _any_within(low, high, room, slack, shift, noise, largest)
            s = _find(largest, links, packed, heads)
            room -= sizes[unsigned(s)]
            _remove(s, sizes, shift, packed, heads, counts, low, high)
            order[unsigned(placed)], placed = s, placed + 1
        lacks[packs] = _lack(room, placed - start, pair_slack, least_room)
        offsets[packs + 1], packs = placed, packs + 1
    return packs, key


@jit
def mix(value):
    """Hash 64 bits (the finalizer of splitmix64)."""
    z = value * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@jit
def below(noise, limit):
    """Scale a hash to an integer below a limit."""
    return np.int64(((noise >> np.uint64(32)) * np.uint64(limit)) >> np.uint64(32))


@jit
def bin_shift_of(capacity):
    shift = 0
    while capacity >> shift >= BINS:
        shift += 1
    return shift


@jit
def _insert_all(sizes, capacity, shift, links, heads, counts, low, high):
    """Insert all segments into empty buckets.

    Returns a hash of the sizes, the tolerance, and the room below which half of it is tolerated.
    """
    key = np.uint64(len(sizes))
    tokens = long = np.int64(0)
    for s in range(len(sizes)):
        size = sizes[s]
        bucket = -(-size >> shift)
        key = key * np.uint64(0x9E3779B97F4A7C15) + np.uint64(size)
        links[s] = heads[unsigned(bucket)]
        heads[unsigned(bucket)] = s
        counts[unsigned(bucket)] += 1
        add(low, high, bucket)
        tokens += size
        long += 2 * size > capacity
    if len(sizes) < SMALL_SET or 5 * tokens <= capacity * len(sizes):
        return mix(key), 0, 0
    packs_per_long = tokens / (capacity * max(long, 1))
    tolerance = int(capacity * min(packs_per_long**2.5 / CHANCE, LARGEST_TOLERANCE))
    return mix(key), tolerance, capacity // NARROW if packs_per_long > SHORT_ONLY else 0


@jit
def _lack(room, segments, slack, least_room):
    """Return the room, but nothing of a pair within its slack or of a segment left alone."""
    if segments > 2:
        return room
    return 0 if segments == 1 and room < least_room else max(room - slack, 0)


@jit
def _room_of_few(counts):
    """Return the first bucket up to which FEW segments fit, or 0 if there are not as many."""
    fit = 0
    for bucket in range(len(counts)):
        fit += counts[bucket]
        if fit >= FEW:
            return bucket
    return 0


@jit
def _update_means(sizes, packed, bin_shift, means):
    """Compute the mean size of the segments without a pack up to each room."""
    counts = np.zeros(BINS, np.int64)
    means[:] = 0
    for s in range(len(sizes)):
        if not packed[s]:
            counts[unsigned(sizes[s] >> bin_shift)] += 1
            means[unsigned(sizes[s] >> bin_shift)] += sizes[s]
    count = tokens = np.int64(0)
    for i in range(BINS):
        count += counts[i]
        tokens += means[i]
        means[i] = tokens // max(count, 1)


@jit
def _compact(rest, packed, end):
    """Remove the segments that have a pack; return the new end."""
    kept = 0
    for i in range(end):
        rest[kept] = rest[i]
        kept += not packed[rest[i]]
    return kept


@jit
def _find(bucket, links, packed, heads):
    """Return the latest segment of a bucket that has no pack."""
    s = np.int64(heads[unsigned(bucket)])
    while packed[unsigned(s)]:
        s = np.int64(links[unsigned(s)])
    heads[unsigned(bucket)] = s
    return s


@jit
def _remove(s, sizes, shift, packed, heads, counts, low, high):
    bucket = -(-sizes[unsigned(s)] >> shift)
    packed[unsigned(s)] = True
    counts[unsigned(bucket)] -= 1
    if counts[unsigned(bucket)] == 0:
        heads[unsigned(bucket)] = -1
        discard(low, high, bucket)


@jit
def _any_within(low, high, room, slack, shift, noise, largest):
    """Return any bucket that leaves at most `slack` of the room, else the largest."""
    found = largest_at_most(low, high, (room - below(noise, min(slack, room) + 1)) >> shift)
    return found if found > 0 and found << shift >= room - slack else largest
