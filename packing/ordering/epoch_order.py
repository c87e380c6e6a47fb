"""The documents of an epoch in order, block by block: shuffled, and mixed by weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .mixture import INTERVAL_END, Mixture
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
        lengths: Callable[[np.ndarray], np.ndarray],
        seed: int,
        shuffle: bool,
    ):
        """Source s holds the documents first_documents[s]:first_documents[s + 1]."""
        self.first_documents, self.lengths = first_documents, lengths
        self.seed, self.shuffle = seed, shuffle

    def epoch(self, epoch: int, mixture: Mixture) -> Iterator[np.ndarray]:
        """Yield the documents of an epoch in blocks; each interval of a schedule ends a block.

        mixture: has drawn the epochs before; draws this one.
        """
        mixture.restart()
        waiting: list[np.ndarray] = []
        count = 0
        for documents, needed in self._draws(epoch, mixture):
            waiting.append(documents)
            count += len(documents)
            if needed == INTERVAL_END or count >= ORDER_BLOCK:
                yield np.concatenate(waiting)
                waiting, count = [], 0
        if count:
            yield np.concatenate(waiting)

    def _draws(self, epoch: int, mixture: Mixture) -> Iterator[tuple[np.ndarray, int]]:
        """Yield the documents that each call of the mixture draws, and what it needs next."""
        laps = [0] * (len(self.first_documents) - 1)
        blocks = [self._lap(source, epoch, 0) for source in range(len(laps))]
        queues = [np.zeros(0, np.int64) for _ in laps]
        while True:
            choices, needed = mixture.draw([self.lengths(queue) for queue in queues])
            yield self._take(choices, queues), needed
            if needed == INTERVAL_END:
                continue
            if needed < 0:
                return
            block = next(blocks[needed], None)
            if block is not None:
                queues[needed] = block
            elif mixture.mark_exhausted(needed):
                return
            elif mixture.stopping_strategy == "all_exhausted":
                laps[needed] += 1
                blocks[needed] = self._lap(needed, epoch, laps[needed])

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
        if not n or (lap and not self.lengths(np.arange(first, first + n)).any()):
            raise ValueError(
                f"source {source} of the mixture is empty, or all of it is dropped: remove it"
            )
        for block in epoch_order(n, self.seed, epoch, self.shuffle, f"{source}.{lap}"):
            yield first + block
