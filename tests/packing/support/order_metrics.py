"""Measures of a shuffled order: does a document's place depend on something it should not?"""

import numpy as np


def correlation(a, b) -> float:
    """Rank correlation; equal values share their mean rank."""
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values):
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def is_chance(values, allowed: float = 0.02) -> bool:
    """Whether the mean of correlations is at most `allowed`, or three standard errors."""
    return abs(np.mean(values)) <= max(allowed, 3 * np.std(values) / len(values) ** 0.5)


def places(packs, count: int):
    """The index of each document's pack."""
    found = np.full(count, -1)
    for index, pack in enumerate(packs):
        found[pack] = index
    return found


def meeting_ratio(packs, next_place) -> float:
    """How often documents of one pack share one in `next_place`, relative to chance."""
    pairs = np.array([(a, b) for pack in packs for i, a in enumerate(pack) for b in pack[:i]])
    sizes, count = np.bincount(next_place), len(next_place)
    chance = (sizes * (sizes - 1)).sum() / (count * (count - 1))
    return float((next_place[pairs[:, 0]] == next_place[pairs[:, 1]]).mean() / chance)
