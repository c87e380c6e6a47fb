"""Counter-based random numbers: a function of (seed, position) alone.

Number `i` of stream `s` is a hash of both, so there is no state to advance. A request draws the
same numbers whatever else is in the batch, however its prompt is chunked, on any rank, and after a
preemption. The global generators are never used.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def splitmix64(x: np.ndarray) -> np.ndarray:
    """Hash each 64-bit word (the finalizer of SplitMix64)."""
    x = np.atleast_1d(np.asarray(x, dtype=np.uint64))  # arrays wrap around, scalars would warn
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    return x ^ (x >> np.uint64(31))


def stream_seed(seed: int, request: int, sample_index: int = 0) -> int:
    """Give each request, and each of its `n` completions, a stream of its own.

    >>> stream_seed(0, 0) != stream_seed(0, 1) != stream_seed(0, 1, 1)
    True
    """
    words = struct.pack("<3Q", seed % 2**64, request, sample_index)
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Draw one number in [0, 1) for each (seed, position) pair.

    >>> uniform(np.array([7, 7]), np.array([0, 1])).round(3).tolist()
    [0.39, 0.017]
    """
    words = np.asarray(seeds, np.uint64) + np.asarray(positions, np.uint64) * _GOLDEN + _GOLDEN
    return (splitmix64(words) >> np.uint64(11)) * 2.0**-53
