"""Trial packs: what best fit would make of a pool if all of it had to leave now.

The longest segment opens a pack, the largest that fits comes next, and where a pair fills the
rest exactly, the pair. Segments of one length stand in a list, the last to come at its head.
"""

from __future__ import annotations

import numpy as np

from ..jit import jit
from .bitset import at, contains, discard, largest_at_most


@jit
def trial_packs(lists, levels, wait, budget, probes, packed, slack, oldest):
    """Take everything out of the lists and into trial packs, the longest first.

    Writes the slots of the packs and where each pack ends (`packed`), what it lacks (`slack`) and
    the most patient of its waits (`oldest`). Gives the number of packs, and how many of them, the
    first ones, hold a segment longer than half a pack.
    """
    heads, links = lists
    low, high = levels
    slots, ends = packed
    n = packs = halves = 0
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
        if 2 * opening > budget:
            halves = packs
        opening = largest_at_most(low, high, opening)
    return packs, halves


@jit
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
