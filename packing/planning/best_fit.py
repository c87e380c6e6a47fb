"""The strategy `best_fit`: fill packs with segments met at random, and complete them by length.

    pending ─┐
             ├─▶ a window of `pool` ─▶ packs, in random order ─┬─▶ emitted
    arrivals ┘                                                 │
       ▲                                                       ▼
       └─────────────────────────────────────── some of the emptiest

A window is packed in sweeps, each of which passes its emptiest packs on to the next in the same
way. A sweep makes one pack after the other:

    the longest segment if it is long, or any      opens a pack                    [ 61        ]
    any that fits                                  joins while there is room       [ 61 9      ]
    any with a partner                             that together fill the pack     [ 61 9 17 13]
    the longest that fits                          if no such pair was found

Best-fit decreasing looks only at lengths, so it puts the same documents together in every epoch.
Here chance decides which segments meet; length only decides which segment opens a pack and which
one completes it. At the end, segments of similar length are exchanged between packs, because in a
small set few have the same length.

There is no random generator: randomness comes from the order of arrival, which the seed and the
epoch shuffle, and from a hash of it. Inside a sweep, a segment is represented by its rank by
length, from 1.
"""

from __future__ import annotations

import numpy as np

from ..numba_jit import jit
from ..ordering.permutation import FACTOR, ONE, below, mix

SWEEP = 1024
"""Segments packed together; with many more, the same ones would remain in every epoch."""
PROBES = 8
"""Arrivals tried to find one that fits or has a partner: enough if every third one does."""
SEVERAL, PAIR = 3.0, 1.75
"""Free space, in mean segments, for any segment to join, or for a pair. Few single segments fit
beside a long one, the same in every epoch, so there a pair needs the space of one mean segment."""
WASTE = 0.04
"""Space that a single segment beside a long one may leave free, so that several segments qualify:
this fraction of the capacity, times the squared ratio of packs without and with a long one, because
the fewer packs have a long one, the less fill it costs; at most a mean segment."""
EXCHANGES, NEAR = 4, 10
"""Exchanges tried for each segment, with a segment up to NEAR ranks away: enough that
documents of a set of 50 meet again at most twice as often as by chance."""
TRIED = 1 << 18
"""Limit of the other orders tried to save a pack; an order costs the square of the number of
segments. With 50 segments, where a pack is up to 6 points of fill, a hundred orders are tried; with
more than 512, where a pack is less than one point, none."""
FULL = 100
"""A pack is full if it lacks at most capacity / FULL: segments that wait until a smaller gap is
closed would meet the same segments again."""
DEFERRED, MOST_SWEEPS = 96, 12
"""In the first window of a stream, one segment in DEFERRED may wait for the next window; in the
second window, two, and so on up to MOST_SWEEPS, as in the sweeps of a window. Segments that wait
are shorter than others: if more of them waited, position and length would correlate by more than
0.02 in a stream that ends soon."""
MAX_DEFERRALS = 14
"""How often a segment may wait for the next window."""
unsigned = np.uint64
"""An index that cannot be negative: numba omits its sign test, a tenth of the time."""


def fit_windows(sizes, deferrals, packed, capacity, pool, flush, final):
    """Pack segments of these sizes (rounded lengths), given in order of arrival.

    deferrals: how often the first segments, those that an earlier call left pending, were deferred;
    packed: segments emitted by earlier calls; flush: whether all but the emptiest pack are emitted.
    Returns the segments of the emitted packs, the offsets of these packs, the pending segments, and
    the deferrals of the first of them.
    """
    n, arrived, pending = len(sizes), len(deferrals), np.arange(len(deferrals))
    order, offsets = [np.arange(0)], [np.zeros(1, np.int64)]
    deferrals = np.concatenate((deferrals, np.zeros(n - arrived, np.int64)))
    flush = flush and sizes.sum() > capacity
    while len(pending) + n - arrived >= pool or ((flush or final) and len(pending) + n > arrived):
        taken = min(pool - len(pending), n - arrived)
        window = np.concatenate((pending, np.arange(arrived, arrived + taken)))
        arrived += taken
        ends_here = arrived == n and (flush or final)
        flush, emitted = flush and not ends_here, offsets[-1][-1]
        segments, ends, waiting = fit_window(
            sizes[window], deferrals[window], packed + emitted, capacity, ends_here,
            ends_here and final,
        )  # fmt: skip
        order.append(window[segments])
        offsets.append(emitted + ends)
        pending = window[waiting]
        deferrals[pending] += 1
    rest = np.concatenate((pending, np.arange(arrived, n)))
    return np.concatenate(order), np.concatenate(offsets), rest, deferrals[pending]


@jit
def fit_window(sizes, deferrals, packed, capacity, flush, final):
    """Pack a window in sweeps.

    flush: whether only the emptiest pack is deferred; final: whether none is. Returns the segments
    of its packs, these in random order, the ends of the packs, and the segments to defer.
    """
    n, arrived, held, packs, key = len(sizes), 0, 0, np.int64(0), np.uint64(0)
    pack_of, segments = np.empty(n, np.int64), np.empty(n, np.int64)
    longest_sweep = max(SWEEP, 8 * capacity * n // sizes.sum())
    while arrived < n:
        taken = min(longest_sweep - held, n - arrived)
        for i in range(taken):
            segments[held + i] = arrived + i
        arrived += taken
        sweep = segments[: held + taken]
        size, arrivals, starts, shift, key = _ranks(sizes, sweep, capacity, key)
        is_last = arrived == n
        ranks, ends, lacks = _fit_sweep(
            size, arrivals, starts, shift, capacity, key, final and is_last
        )
        waits = np.zeros(len(lacks), np.bool_)
        if not (final and is_last):
            sweeps, times = MOST_SWEEPS, np.zeros(len(sweep) + 1, np.int64)
            if is_last:
                sweeps = min(sweeps, 1 + (packed + arrived - len(sweep)) // SWEEP)
                for s in range(len(sweep)):
                    times[arrivals[s]] = deferrals[sweep[s]]
            limit = 0 if flush and is_last else len(sweep) * sweeps // DEFERRED
            _choose_waiting(ranks, ends, lacks, times, limit, waits)
        place = _exchange(size, ranks, ends, waits, capacity, key)
        numbers, held = np.empty(len(waits), np.int64), 0
        for p in range(len(waits)):
            numbers[p] = packs
            packs += not waits[p]
        for s in range(len(sweep)):
            segment, p = sweep[s], place[arrivals[s]]
            pack_of[segment] = -1 if waits[p] else numbers[p]
            segments[held] = segment  # in place: as many or fewer were read
            held += pack_of[segment] < 0
    order, ends = _shuffled_packs(pack_of, packs, key)
    return order, ends, segments[:held]


@jit
def _shuffled_packs(pack_of, packs, key):
    """Return the segments of the packs, these in random order, and the ends of the packs."""
    places = np.arange(packs)
    _shuffle(places, key)
    offsets = np.zeros(packs + 1, np.int64)
    for p in pack_of:
        if p >= 0:
            offsets[places[p] + 1] += 1
    for place in range(packs):
        offsets[place + 1] += offsets[place]
    order, ends = np.empty(offsets[packs], np.int64), offsets.copy()
    for s in range(len(pack_of)):
        if pack_of[s] >= 0:
            place = places[pack_of[s]]
            order[ends[place]] = s
            ends[place] += 1
    return order, offsets[1:]


@jit
def _ranks(sizes, sweep, capacity, key):
    """Rank the segments of a sweep by size, from 1.

    Returns the size of each rank (0 for rank 0, which no segment has), the ranks in order of
    arrival, the last rank before each range of 2 ** shift sizes, shift, and a hash of the sizes.
    """
    n, shift = len(sweep), 0
    while capacity >> shift > 8 * n:
        shift += 1
    size, arrivals = np.zeros(n + 1, np.int64), np.empty(n, np.int64)
    by_size, starts = np.empty(n + 1, np.int64), np.zeros((capacity >> shift) + 3, np.int32)
    for segment in sweep:
        starts[(sizes[segment] >> shift) + 2] += 1
        key = key * FACTOR + np.uint64(sizes[segment])
    for i in range(1, len(starts)):
        starts[i] += starts[i - 1]
    for s in range(n):
        one = sizes[sweep[s]]
        rank = starts[(one >> shift) + 1] + 1
        starts[(one >> shift) + 1] = rank
        while size[rank - 1] > one:  # inside its range
            size[rank], by_size[rank] = size[rank - 1], by_size[rank - 1]
            rank -= 1
        size[rank], by_size[rank] = one, s
    for rank in range(1, n + 1):
        arrivals[by_size[rank]] = rank
    return size, arrivals, starts, shift, mix(key)


@jit
def _fit_sweep(size, arrivals, starts, shift, capacity, key, retry):
    """Put all segments into packs; return their ranks, the packs' offsets, and what they lack.

    retry: whether to try other orders of arrival if fewer packs could be possible.
    """
    n, tokens = len(arrivals), size.sum()
    fewest = max(-(-tokens // capacity), n - _up_to(size, starts, shift, capacity // 2))
    best = _make_packs(size, arrivals, starts, shift, capacity, key, WASTE, n * capacity)
    arrivals = arrivals.copy()
    tried = 0
    while retry and len(best[2]) > fewest and tried + n * n <= TRIED:
        tried += n * n
        key = mix(key)
        _shuffle(arrivals, key)
        spare = (len(best[2]) - 1) * capacity - tokens
        found = _make_packs(size, arrivals, starts, shift, capacity, key, 0.0, spare)
        if found[1][-1] == n:
            best = found
    return best


@jit
def _make_packs(size, arrivals, starts, shift, capacity, key, waste, spare):
    """Put the segments into packs (see above), until these leave more than `spare` free."""
    n, rest, packs, placed = len(arrivals), arrivals.copy(), 0, 0
    order, offsets, lacks = np.empty(n, np.int64), np.zeros(n + 1, np.int64), np.empty(n, np.int64)
    free, longest_short = np.arange(n + 1), _up_to(size, starts, shift, capacity // 2)
    short, tokens, long = longest_short, size[: longest_short + 1].sum(), n - longest_short
    scarce = short < 2 * long
    slack = _slack(size.sum(), tokens, short, long, capacity, waste)
    longest, cursor, end = n, 0, n
    while placed < n and spare >= 0:
        longest = _last_free(free, longest)
        room, start, partner = capacity, placed, 0
        chosen = longest if longest > longest_short else 0
        while True:
            if chosen:
                order[unsigned(placed)], free[unsigned(chosen)] = chosen, chosen - 1
                placed += 1
                room -= size[unsigned(chosen)]
                if chosen <= longest_short:
                    tokens -= size[unsigned(chosen)]
                    short -= 1
            if partner:
                chosen, partner = partner, 0
                continue
            if room == 0 or placed == n:
                break
            beside_long = placed == start + 1 and 2 * room < capacity
            joins = room * short > SEVERAL * tokens
            pairs = room * short > (1.0 if beside_long else PAIR) * tokens
            pairs &= not (beside_long and scarce)
            probes, chosen = PROBES if pairs else 0, 0
            while probes and not chosen:
                if cursor == end:
                    cursor, end = 0, _drop_packed(rest, free, end)
                any_one, cursor = rest[unsigned(cursor)], cursor + 1
                if free[unsigned(any_one)] != any_one:
                    continue
                probes -= 1
                left = room - size[unsigned(any_one)]
                if left == 0 or (joins and left > 0):
                    chosen = any_one
                elif left > 0:
                    partner = _last_free(free, _up_to(size, starts, shift, left))
                    if partner == any_one:
                        partner = _last_free(free, partner - 1)
                    partner = partner if size[unsigned(partner)] == left else 0
                    chosen = any_one if partner else 0
            if not chosen:
                chosen = _last_free(free, _up_to(size, starts, shift, room))
                if not chosen:
                    break
                if placed == start + 1:
                    target = room - below(mix(key + np.uint64(placed)), min(slack, room) + 1)
                    other = _last_free(free, _up_to(size, starts, shift, target))
                    chosen = other if size[other] >= max(1, room - slack) else chosen
        spare -= room
        room -= slack if placed - start <= 2 else 0
        lacks[packs] = room if room > capacity // FULL else 0
        offsets[packs + 1], packs = placed, packs + 1
    return order, offsets[: packs + 1], lacks[:packs]


@jit
def _slack(all_tokens, tokens, short, long, capacity, waste):
    """Return the space that a single segment beside a long one may leave free."""
    if long == 0 or short < 2 * long:
        return np.int64(0)
    ratio = max(0.0, all_tokens / (long * capacity) - 1)
    return min(tokens // short, np.int64(waste * capacity * ratio * ratio))


@jit
def _up_to(size, starts, shift, bound):
    """Return the last rank of a size up to a bound, or 0."""
    first = np.int64(starts[unsigned(bound >> shift)])
    last = np.int64(starts[unsigned((bound >> shift) + 1)])
    if size[unsigned(last)] <= bound:
        return last
    while last - first > 1:
        middle = (first + last) >> 1
        if size[unsigned(middle)] <= bound:
            first = middle
        else:
            last = middle
    return first


@jit
def _last_free(free, rank):
    """Return the last rank up to this one that has no pack, or 0; compress the path to it."""
    while free[unsigned(rank)] != rank:
        free[unsigned(rank)] = free[unsigned(free[unsigned(rank)])]
        rank = free[unsigned(rank)]
    return rank


@jit
def _drop_packed(rest, free, end):
    """Remove the ranks that have a pack; return the new end."""
    kept = 0
    for i in range(end):
        rest[kept] = rest[i]
        kept += free[rest[i]] == rest[i]
    return kept


@jit
def _choose_waiting(ranks, ends, lacks, times, limit, waits):
    """Mark the emptiest packs that are not full, of at most `limit` segments or a single one.

    times: how often the segment of each rank was deferred.
    """
    segments = 0
    while True:
        p = 0  # no sort: numba compiles one for 1.5 s, and every user waits for it once
        for other in range(1, len(lacks)):
            p = other if lacks[other] >= lacks[p] else p
        count, most = ends[p + 1] - ends[p], np.int64(0)
        if lacks[p] == 0 or (segments and segments + count > limit):
            break
        for i in range(ends[p], ends[p + 1]):
            most = max(most, times[ranks[i]])
        if most < MAX_DEFERRALS and count < len(ranks):
            waits[p] = True
            segments += count
        lacks[p] = 0


@jit
def _exchange(size, ranks, ends, waits, capacity, key):
    """Exchange segments of similar size between packs that leave; return the pack of each rank."""
    n, packs = len(ranks), len(waits)
    place, rooms = np.zeros(n + 1, np.int64), np.full(packs, capacity)
    for p in range(packs):
        for i in range(ends[p], ends[p + 1]):
            place[ranks[i]] = p
            rooms[p] -= size[ranks[i]]
    leaving, count = np.empty(n, np.int64), 0
    for rank in range(1, n + 1):
        leaving[count] = rank
        count += not waits[place[rank]]
    for _ in range(EXCHANGES):
        for i in range(NEAR, count):
            key = key * FACTOR + ONE
            rank = unsigned(leaving[unsigned(i)])
            other = unsigned(leaving[unsigned(i - 1 - below(key, NEAR))])
            p, q = unsigned(place[rank]), unsigned(place[other])
            growth = size[rank] - size[other]
            fits = growth <= rooms[q]  # without a branch: about half of them do
            growth = growth if fits else 0
            place[rank] = q if fits else p
            place[other] = p if fits else q
            rooms[p] += growth
            rooms[q] -= growth
    return place


@jit
def _shuffle(values, key):
    for i in range(len(values)):
        key = key * FACTOR + ONE
        other = i + below(key, len(values) - i)
        values[i], values[other] = values[other], values[i]
