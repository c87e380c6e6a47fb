"""The order of a run, as pure functions of integers: no generator to save, no table to keep.

A shuffle is a keyed permutation that can be evaluated anywhere: a place of the epoch goes through
a few rounds of a Feistel network on a grid a x b that just covers n, and walks on while it lands
outside. So place 10^9 of an epoch costs as much as place 0, in any process, after any restart.

    key(seed, epoch, ...) ─▶ shuffled(places, n, key) ─▶ documents

Which packs a worker of a rank makes is arithmetic too: pack k belongs to rank k mod world, and the
packs of a rank are dealt to its workers one by one, as a DataLoader collects them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from math import isqrt

import numpy as np

from ..jit import jit


def key(*parts: int | str) -> np.uint64:
    """Give the key of one shuffle, the same on every machine and in every version of numpy.

    >>> int(key(0, 1)), int(key(0, 2)) == int(key(0, 1))
    (18035787800520607725, False)
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def shuffled(places: np.ndarray, n: int, shuffle_key: np.uint64) -> np.ndarray:
    """Give the document at each of these places of a shuffled epoch of n documents.

    >>> shuffled(np.arange(8), 8, key(0)).tolist()
    [6, 4, 1, 0, 2, 5, 7, 3]
    """
    if n < 2:
        return np.zeros(len(places), np.int64)
    columns = isqrt(n - 1) + 1
    out = np.empty(len(places), np.int64)
    _walk(np.asarray(places, np.int64), n, columns, -(-n // columns), shuffle_key, out)
    return out


@jit
def _walk(places, n, columns, rows, shuffle_key, out):
    size, wide, high = np.uint64(n), np.uint64(columns), np.uint64(rows)
    for i in range(len(places)):
        at = np.uint64(places[i])
        while True:
            y = at // wide
            x = at - y * wide
            round_key = shuffle_key
            for _ in range(4):
                x += _below(wide, y, round_key)
                x = x - wide if x >= wide else x
                round_key += np.uint64(0xD1B54A32D192ED03)
                y += _below(high, x, round_key)
                y = y - high if y >= high else y
                round_key += np.uint64(0xD1B54A32D192ED03)
            at = y * wide + x
            if at < size:
                break
        out[i] = at


@jit
def _below(limit, value, round_key):
    """Mix a value (the finalizer of splitmix64) and scale it to a number below `limit`."""
    z = (value + round_key) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z >> np.uint64(32)) * limit) >> np.uint64(32)


@dataclass(frozen=True, slots=True)
class Position:
    """Where a pass stands: packs below `index` are done; `epoch` began with pack `start`."""

    epoch: int = 0
    start: int = 0
    index: int = 0
    until: int | None = None
    """The epoch before which the pass ends; None: it never does."""


@dataclass(frozen=True, slots=True)
class Share:
    """The packs that one worker of one rank makes.

    >>> Share(rank=1, world=2, worker=0, workers=2).first(0), Share(1, 2, 0, 2).stride
    (1, 4)
    """

    rank: int = 0
    world: int = 1
    worker: int = 0
    workers: int = 1

    def __post_init__(self):
        if not 0 <= self.rank < self.world:
            raise ValueError(
                f"rank {self.rank} is not one of {self.world} ranks, counted from 0: give both as "
                "torch.distributed has them, or neither"
            )
        if not 0 <= self.worker < self.workers:
            raise ValueError(f"worker {self.worker} is not one of {self.workers} workers")

    @property
    def stride(self) -> int:
        """Give the distance between two packs of this share."""
        return self.world * self.workers

    def first(self, base: int) -> int:
        """Give the first pack of this share when the run goes on at pack `base`."""
        return base + (self.rank - base) % self.world + self.worker * self.world

    def next(self, base: int, index: int) -> int:
        """Give the first pack of this share at or behind `index`."""
        first = self.first(base)
        return first + max(0, -(-(index - first) // self.stride)) * self.stride

    def round_start(self, index: int, base: int) -> int:
        """Give the first pack of the round of `world` packs, counted from `base`, of `index`."""
        return index - (index - base) % self.world

    def round_end(self, index: int, base: int) -> int:
        """Give the pack behind that round."""
        return self.round_start(index, base) + self.world
