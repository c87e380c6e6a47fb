"""Lay planned segments end to end: from flat tokens to the rows a training step eats.

    flat       [ d0 d0 d0 | d1 d1 | d2 d2 d2 d2 ]        bounds [ 0 3 5 9 ]
    segments   d2[0:4], d1[0:2]
    tokens     [ d2 d2 d2 d2 | d1 d1 ]
    labels     [ .  d2 d2 d2 | .  d1 ]                   . = -100: nothing precedes a segment
    positions  [ 0  1  2  3  | 0  1  ]
    cu_seqlens [ 0             4       6 ]

With `align`, every segment is followed by fillers up to a multiple. They belong to its sequence,
so cu_seqlens count them, and come after its tokens, so causal attention never sees them; their
labels are -100.
"""

from __future__ import annotations

import numpy as np

from .compiled import compiled
from .sample import IGNORE


def gather(
    flat: np.ndarray,
    bounds: np.ndarray,
    documents: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    *,
    align: int = 1,
    filler: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Give tokens, labels (int64) and cu_seqlens (int32) of segments laid end to end.

    Document d is flat[bounds[d]:bounds[d+1]]; `flat` may be memory-mapped and of any integer type.
    The segments may be those of one pack, or of many: one call for many rows is faster, and pack p
    of a plan is then cu_seqlens[plan.offsets[p]] : cu_seqlens[plan.offsets[p+1]].

    >>> flat, bounds = np.array([5, 6, 7, 8, 9], np.uint16), np.array([0, 3, 5])
    >>> rows = gather(flat, bounds, *map(np.array, ([1, 0], [0, 0], [2, 3])))
    >>> [row.tolist() for row in rows], positions(rows[2]).tolist()
    ([[8, 9, 5, 6, 7], [-100, 9, -100, 6, 7], [0, 2, 5]], [0, 1, 0, 1, 2])
    """
    heads = _heads(bounds, documents, starts, lengths)
    if len(heads) < len(lengths):
        s = len(heads)
        raise ValueError(
            f"segment {starts[s]}:{starts[s] + lengths[s]} is not inside document {documents[s]}: "
            "the plan belongs to other data"
        )
    return _lay(np.asarray(flat), heads, lengths, align, filler)


@compiled
def positions(cu_seqlens):
    """Give the int64 positions of all tokens, restarting in every sequence."""
    places = np.empty(cu_seqlens[-1], np.int64)
    for s in range(len(cu_seqlens) - 1):
        sequence = places[cu_seqlens[s] : cu_seqlens[s + 1]]
        for t in range(len(sequence)):
            sequence[t] = t
    return places


@compiled
def _heads(bounds, documents, starts, lengths):
    """Find where segments begin in the flat tokens, up to the first that is not inside its own."""
    heads = np.empty(len(documents), np.int64)
    for s in range(len(documents)):
        d = documents[s]
        if d < 0 or d + 1 >= len(bounds) or starts[s] < 0 or lengths[s] < 1:
            return heads[:s]
        heads[s] = bounds[d] + starts[s]
        if heads[s] + lengths[s] > bounds[d + 1]:
            return heads[:s]
    return heads


@compiled
def _lay(flat, heads, lengths, align, filler):
    """Copy the segments out of the flat tokens, twice: tokens, and labels without their heads."""
    cu_seqlens = np.zeros(len(heads) + 1, np.int32)
    for s in range(len(heads)):
        cu_seqlens[s + 1] = cu_seqlens[s] + -(-lengths[s] // align) * align
    tokens = np.empty(cu_seqlens[-1], np.int64)
    labels = np.empty_like(tokens)
    for s in range(len(heads)):
        start, end = cu_seqlens[s], cu_seqlens[s + 1]
        source = flat[heads[s] : heads[s] + lengths[s]]
        into, into_labels = tokens[start:end], labels[start:end]
        for t in range(len(source)):
            into[t] = source[t]
            into_labels[t] = source[t]
        into[lengths[s] :] = filler
        into_labels[lengths[s] :] = IGNORE
        into_labels[0] = IGNORE
    return tokens, labels, cu_seqlens
