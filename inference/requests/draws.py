"""The random numbers of one call: which stream it belongs to, and which of its prompts are here.

    (run's seed, stream, number of the call, index of the prompt over all ranks, sample, position)

Every call draws fresh numbers; the same calls in the same order, with the same seed, draw the same.
Ranks that generate for themselves draw different numbers, ranks of one tensor-parallel group the
same; a call that distributes its prompts over the ranks draws what one rank alone would.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...runtime import number_call
from ..live_model.replica import replica_ranks
from .rng import stream_seed


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
