"""The documents of an epoch in their order, window by window: shuffled, and mixed by weight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from .mixture import Mixture, Stop, Weight
from .permutation import key, shuffled

WINDOW = 1 << 16
"""Documents ordered at a time."""


def epoch_order(n: int, seed: int, epoch: int, shuffle: bool, lap: str = "") -> Iterator:
    """Give the documents 0..n-1 in the order of an epoch, in windows.

    >>> [window.tolist() for window in epoch_order(3, seed=0, epoch=0, shuffle=False)]
    [[0, 1, 2]]
    """
    for begin in range(0, n, WINDOW):
        places = np.arange(begin, min(begin + WINDOW, n))
        yield shuffled(places, n, key("epoch", seed, epoch, lap)) if shuffle else places


class MixedOrder:
    """The documents of several sources, numbered through, drawn by weight."""

    def __init__(
        self,
        firsts: Sequence[int],
        lengths: np.ndarray,
        weights: Sequence[Weight],
        stop: Stop,
        seed: int,
        shuffle: bool,
    ):
        """Source s holds the documents firsts[s]:firsts[s + 1] of `lengths`."""
        self.firsts, self.lengths = firsts, lengths
        self.weights: Sequence[Weight] = weights
        self.stop: Stop = stop
        self.seed, self.shuffle = seed, shuffle

    def epoch(self, epoch: int, drawn: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """Give an epoch's documents; `drawn` are the tokens of each source before it."""
        mixture = Mixture(self.weights, self.stop)
        if drawn is not None:
            mixture.drawn[:] = drawn
        laps = [0] * len(self.weights)
        windows = [self._lap(s, epoch, 0) for s in range(len(laps))]
        coming = [np.zeros(0, np.int64) for _ in laps]
        while True:
            choices, short = mixture.draw([self.lengths[documents] for documents in coming])
            if len(choices):
                yield self._take(choices, coming)
            if short < 0:
                return
            more = next(windows[short], None)
            if more is not None:
                coming[short] = more
            elif mixture.ran_out(short):
                return
            elif self.stop == "cycle":
                laps[short] += 1
                windows[short] = self._lap(short, epoch, laps[short])

    def _take(self, choices: np.ndarray, coming: list[np.ndarray]) -> np.ndarray:
        documents = np.empty(len(choices), np.int64)
        for source in range(len(coming)):
            chosen = choices == source
            count = int(chosen.sum())
            documents[chosen], coming[source] = coming[source][:count], coming[source][count:]
        return documents

    def _lap(self, source: int, epoch: int, lap: int) -> Iterator[np.ndarray]:
        first = self.firsts[source]
        n = self.firsts[source + 1] - first
        if not n:
            raise ValueError(f"source {source} of the mixture is empty: leave it out")
        for window in epoch_order(n, self.seed, epoch, self.shuffle, f"{source}.{lap}"):
            yield first + window
