"""The documents of an epoch in order, block by block: shuffled, and mixed by weight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from .mixture import Mixture, StoppingStrategy, Weight
from .permutation import permute, shuffle_key

ORDER_BLOCK = 1 << 16
"""Documents ordered at a time."""


def epoch_order(n: int, seed: int, epoch: int, shuffle: bool, lap: str = "") -> Iterator:
    """Yield the documents 0..n-1 in the order of an epoch, in blocks.

    >>> [block.tolist() for block in epoch_order(3, seed=0, epoch=0, shuffle=False)]
    [[0, 1, 2]]
    """
    for begin in range(0, n, ORDER_BLOCK):
        positions = np.arange(begin, min(begin + ORDER_BLOCK, n))
        key = shuffle_key("epoch", seed, epoch, lap)
        yield permute(positions, n, key) if shuffle else positions


class MixedOrder:
    """The documents of several sources, numbered consecutively and drawn by weight."""

    def __init__(
        self,
        first_documents: Sequence[int],
        lengths: np.ndarray,
        weights: Sequence[Weight],
        stopping_strategy: StoppingStrategy,
        seed: int,
        shuffle: bool,
    ):
        """Source s holds the documents first_documents[s]:first_documents[s + 1] of `lengths`."""
        self.first_documents, self.lengths = first_documents, lengths
        self.weights: Sequence[Weight] = weights
        self.stopping_strategy: StoppingStrategy = stopping_strategy
        self.seed, self.shuffle = seed, shuffle

    def epoch(self, epoch: int, tokens_drawn: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """Yield the documents of an epoch.

        tokens_drawn: the tokens drawn from each source before this epoch.
        """
        mixture = Mixture(self.weights, self.stopping_strategy)
        if tokens_drawn is not None:
            mixture.tokens_drawn[:] = tokens_drawn
        laps = [0] * len(self.weights)
        blocks = [self._lap(source, epoch, 0) for source in range(len(laps))]
        queues = [np.zeros(0, np.int64) for _ in laps]
        while True:
            choices, needed = mixture.draw([self._lengths(queue) for queue in queues])
            if len(choices):
                yield self._take(choices, queues)
            if needed < 0:
                return
            block = next(blocks[needed], None)
            if block is not None:
                queues[needed] = block
            elif mixture.mark_exhausted(needed):
                return
            elif self.stopping_strategy == "all_exhausted":
                laps[needed] += 1
                blocks[needed] = self._lap(needed, epoch, laps[needed])

    def _lengths(self, documents: np.ndarray) -> np.ndarray:
        return self.lengths[documents].astype(np.int64, copy=False)

    def _take(self, choices: np.ndarray, queues: list[np.ndarray]) -> np.ndarray:
        """Remove the chosen documents from the queues and return them in the order of choice."""
        documents = np.empty(len(choices), np.int64)
        for source in range(len(queues)):
            chosen = choices == source
            count = int(chosen.sum())
            documents[chosen], queues[source] = queues[source][:count], queues[source][count:]
        return documents

    def _lap(self, source: int, epoch: int, lap: int) -> Iterator[np.ndarray]:
        first = self.first_documents[source]
        n = self.first_documents[source + 1] - first
        if not n:
            raise ValueError(f"source {source} of the mixture is empty: remove it")
        for block in epoch_order(n, self.seed, epoch, self.shuffle, f"{source}.{lap}"):
            yield first + block
