"""Shuffle by a keyed permutation, evaluated at any position, without a generator or a table.

A shuffle is a keyed permutation that can be evaluated at any position: the position passes
through four rounds of a Feistel network on a grid a x b that just covers n, and cycle-walks while
the result is outside n. Position 10^9 of an epoch costs as much as position 0, in any process,
after any restart.

    shuffle_key(seed, epoch, ...) ─▶ permute(positions, n, key) ─▶ documents

`epoch_order` yields an epoch of one source in blocks; mixture.py mixes several.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from math import isqrt

import numpy as np

from ..numba_jit import jit

FACTOR, ONE = np.uint64(0x9E3779B97F4A7C15), np.uint64(1)
ORDER_BLOCK = 1 << 16
"""Documents ordered at a time."""


def shuffle_key(*parts: int | str) -> np.uint64:
    """Return the key of one shuffle, the same on every machine and in every version of numpy.

    >>> int(shuffle_key(0, 1)), int(shuffle_key(0, 2)) == int(shuffle_key(0, 1))
    (18035787800520607725, False)
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def permute(positions: np.ndarray, n: int, key: np.uint64) -> np.ndarray:
    """Return the document at each of these positions of a shuffled epoch of n documents.

    >>> permute(np.arange(8), 8, shuffle_key(0)).tolist()
    [6, 4, 1, 0, 2, 5, 7, 3]
    """
    if n < 2:
        return np.zeros(len(positions), np.int64)
    columns = isqrt(n - 1) + 1
    out = np.empty(len(positions), np.int64)
    _feistel(np.asarray(positions, np.int64), n, columns, -(-n // columns), key, out)
    return out


def epoch_order(
    n: int,
    seed: int,
    epoch: int,
    shuffle: bool,
    lap: str = "",
    positions: tuple[int, int] | None = None,
) -> Iterator:
    """Yield the documents 0..n-1 in the order of an epoch, in blocks.

    positions: begin and end of a part of this order; default: all of it.

    >>> [block.tolist() for block in epoch_order(3, seed=0, epoch=0, shuffle=False)]
    [[0, 1, 2]]
    """
    first, end = positions or (0, n)
    key = shuffle_key("epoch", seed, epoch, lap)
    for begin in range(first, end, ORDER_BLOCK):
        some = np.arange(begin, min(begin + ORDER_BLOCK, end))
        yield permute(some, n, key) if shuffle else some


@jit
def _feistel(positions, n, columns, rows, key, out):
    size, width, height = np.uint64(n), np.uint64(columns), np.uint64(rows)
    for i in range(len(positions)):
        value = np.uint64(positions[i])
        while True:
            y = value // width
            x = value - y * width
            round_key = key - ONE  # `mix` adds one
            for _ in range(4):
                x += np.uint64(below(mix(y + round_key), width))
                x = x - width if x >= width else x
                round_key += np.uint64(0xD1B54A32D192ED03)
                y += np.uint64(below(mix(x + round_key), height))
                y = y - height if y >= height else y
                round_key += np.uint64(0xD1B54A32D192ED03)
            value = y * width + x
            if value < size:
                break
        out[i] = value


@jit
def mix(value):
    """Hash 64 bits (the finalizer of splitmix64)."""
    z = value * FACTOR + FACTOR
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@jit
def below(noise, limit):
    """Scale a hash to an integer below a limit."""
    return np.int64(((noise >> np.uint64(32)) * np.uint64(limit)) >> np.uint64(32))
