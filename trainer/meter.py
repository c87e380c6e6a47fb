"""What a training loop did: tokens and samples per second, fill, samples per pack."""

from __future__ import annotations

import time

from .loader import PackInfo


class Meter:
    """Count packs as they are stepped; read the rates since the last reading.

    >>> meter = Meter(ranks=2)
    >>> meter.seconds = lambda: 2.0
    >>> meter.add(PackInfo(0, {}, 10, [4, 5], 7))
    >>> meter.read()["tokens_per_second"], meter.read()["fill"], meter.read()["samples_per_pack"]
    (9.0, 0.9, 2.0)
    """

    def __init__(self, ranks: int = 1):
        self.ranks = ranks
        self.reset()

    def reset(self) -> None:
        self._start = time.perf_counter()
        self._packs = self._tokens = self._budget = self._samples = 0

    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def add(self, info: PackInfo) -> None:
        self._packs += 1
        self._tokens += int(sum(info.lengths))
        self._budget += info.budget
        self._samples += len(info.lengths)

    def read(self) -> dict[str, float]:
        """Rates over all ranks, taking this rank's packs for typical."""
        seconds, packs = self.seconds(), max(1, self._packs)
        return {
            "tokens_per_second": self.ranks * self._tokens / seconds,
            "samples_per_second": self.ranks * self._samples / seconds,
            "fill": self._tokens / max(1, self._budget),
            "samples_per_pack": self._samples / packs,
        }
