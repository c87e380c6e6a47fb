"""The random numbers of a request: a hash of its key and the position, without a state.

    key: (engine's seed, stream, number of the call, index of the prompt over all ranks, sample)
         or, with seed=, (seed, hash of the prompt, sample)

A request draws the same numbers whatever else is in the batch, however its prompt is chunked, on
any rank, and after a preemption. The global generators are never used.

Every call draws fresh numbers; the same calls in the same order, with the same seed, draw the same.
Independent ranks draw different numbers, ranks of one tensor-parallel group the same. A call that
distributes its prompts over ranks draws what a single rank would.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...runtime import number_call
from ..live_model.replica import replica_ranks

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class Draws:
    """The key of a call's random numbers, and the index of each of its prompts."""

    stream: str
    call: int
    indices: Sequence[int] | None = None
    """Where the prompts are among those of all ranks; None: 0, 1, 2, …"""

    def seed(self, run_seed: int, prompt: int, sample: int) -> int:
        """Return the seed of one completion.

        >>> here, there = Draws("direct", 5, [2, 0]), Draws("direct", 5)
        >>> here.seed(0, 0, 0) == there.seed(0, 2, 0) != there.seed(0, 2, 1)
        True
        """
        index = prompt if self.indices is None else self.indices[prompt]
        words = f"{self.stream}\0{self.call}\0{index}".encode()
        key = hashlib.blake2b(words, digest_size=8).digest()
        return stream_seed(run_seed, int.from_bytes(key, "little"), sample)


def own_draws(model: Any) -> Draws:
    """Number a call that this rank makes for itself."""
    stream, call = number_call()
    first = replica_ranks(model)[0]
    return Draws(f"{stream}\0rank {first}" if first else stream, call)


def shared_draws() -> Draws:
    """Number a call that all ranks make together, each with some of its prompts."""
    return Draws(*number_call("/all ranks"))


def splitmix64(x: np.ndarray) -> np.ndarray:
    """Hash each 64-bit word (the finalizer of SplitMix64)."""
    x = np.atleast_1d(np.asarray(x, dtype=np.uint64))  # arrays wrap around, scalars would warn
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    return x ^ (x >> np.uint64(31))


def stream_seed(seed: int, request: int, sample_index: int = 0) -> int:
    """Give each request, and each of its `n` completions, a separate stream.

    >>> stream_seed(0, 0) != stream_seed(0, 1) != stream_seed(0, 1, 1)
    True
    """
    words = struct.pack("<3Q", seed % 2**64, request, sample_index)
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")


def prompt_hash(token_ids: np.ndarray) -> int:
    """Hash of a prompt's tokens, the same in every process."""
    return int.from_bytes(hashlib.blake2b(token_ids.tobytes(), digest_size=8).digest(), "little")


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Draw one number in [0, 1) for each (seed, position) pair.

    >>> uniform(np.array([7, 7]), np.array([0, 1])).round(3).tolist()
    [0.39, 0.017]
    """
    words = np.asarray(seeds, np.uint64) + np.asarray(positions, np.uint64) * _GOLDEN + _GOLDEN
    return (splitmix64(words) >> np.uint64(11)) * 2.0**-53
