"""What a training loop did: tokens and samples per second, fill, waste, MFU, waits, sources.

meter = Meter.of(loader, model)
for batch in loader:
    ...
    meter.add(loader.last)
meter.read()     {"tokens_per_second": ..., "fill": ..., "mfu": ..., ...} since the last reset

What happens inside `away`, evaluations above all, is not part of the time that rates are of.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...packing import IGNORE_INDEX
from ...runtime import world_size
from ..data.loader import PackedLoader, PackInfo
from .flops import ModelFlops, stated_peak

if TYPE_CHECKING:
    from torch import Tensor


class _Away:
    """Seconds that this process has spent on something else than training."""

    total, depth = 0.0, 0


@contextmanager
def away() -> Iterator[None]:
    """Keep the time of what happens inside out of every meter's rates."""
    began = time.perf_counter()
    _Away.depth += 1
    try:
        yield
    finally:
        _Away.depth -= 1
        if not _Away.depth:
            _Away.total += time.perf_counter() - began


class Meter:
    """Count packs as they are stepped; read the rates since the last reset.

    >>> meter = Meter(ranks=2)
    >>> meter.seconds = lambda: 2.0
    >>> meter.add(PackInfo(0, {}, 10, np.array([4, 5]), 7))
    >>> rates = meter.read()
    >>> rates["tokens_per_second"], rates["fill"], rates["samples_per_pack"]
    (9.0, 0.9, 2.0)
    """

    def __init__(
        self,
        ranks: int = 1,
        *,
        flops: ModelFlops | None = None,
        peak: float | None = None,
        waited: Callable[[], float] | None = None,
        became: Callable[[], dict[str, int]] | None = None,
        by_source: bool = True,
    ):
        """Say what to measure against.

        flops, peak: the model's arithmetic and one device's FLOP/s, for the MFU.
        waited: seconds spent waiting for data so far, as `PackedLoader.waited` has it.
        became: how many samples were split, truncated, dropped, as `PackedLoader.became` says.
        by_source: tell the loss by source, where token losses are given.
        """
        self.ranks, self.by_source = ranks, by_source
        self.flops, self.peak = flops, peak
        self._waited, self._became = waited or (lambda: 0.0), became or dict
        self._by_source: dict[int, list[Tensor]] = {}
        self.seen = {"tokens": 0, "samples": 0, "packs": 0}
        """Of this rank, since the beginning."""
        self.reset()

    @classmethod
    def of(cls, loader: PackedLoader, model: Any) -> Meter:
        """Measure the training of a causal LM on a loader's batches."""
        return cls(
            world_size(),
            flops=ModelFlops.of_model(model),
            peak=stated_peak(next(model.parameters()).device),
            waited=lambda: loader.waited,
            became=loader.became,
            by_source=loader.dataset.settings["weights"] is not None,
        )

    def reset(self) -> None:
        """Begin a new reading."""
        self._start, self._waited_before = time.perf_counter(), self._waited()
        self._away_before = _Away.total
        self._packs = self._tokens = self._budget = self._samples = 0
        self._counted = self._flops = 0.0
        self._by_source.clear()

    def seconds(self) -> float:
        """Return the seconds of training since the last reset."""
        return time.perf_counter() - self._start - (_Away.total - self._away_before)

    def add(
        self, info: PackInfo, labels: Tensor | None = None, token_losses: Tensor | None = None
    ) -> None:
        """Count one stepped pack, and its tokens' losses by source if they are given."""
        tokens, samples = int(np.sum(info.lengths)), len(info.lengths)
        self._packs += 1
        self._tokens += tokens
        self._budget += info.budget
        self._samples += samples
        self._counted += info.counted
        for name, more in (("tokens", tokens), ("samples", samples), ("packs", 1)):
            self.seen[name] += more
        if self.flops is not None:
            self._flops += self.flops.of(info.lengths)
        if self.by_source and labels is not None and token_losses is not None:
            self._add_losses(info, labels.to(token_losses.device), token_losses)

    def _add_losses(self, info: PackInfo, labels: Tensor, token_losses: Tensor) -> None:
        """Book each counted token's loss on the source its sample came from, without a sync."""
        owner = torch.from_numpy(np.repeat(info.sources, info.lengths).astype(np.int64))
        owner = owner.to(labels.device, non_blocking=True)
        losses, labels = token_losses.flatten()[: len(owner)], labels.flatten()[: len(owner)]
        counted = (labels != IGNORE_INDEX).float()
        for source in np.unique(info.sources).tolist():
            here = counted * (owner == source)
            pair = torch.stack([(losses * here).sum(), here.sum()])
            self._by_source.setdefault(source, []).append(pair)

    def read(self) -> dict[str, float]:
        """Rates over all ranks, taking this rank's packs for typical."""
        seconds, packs = max(self.seconds(), 1e-9), max(1, self._packs)
        rates = {
            "tokens_per_second": self.ranks * self._tokens / seconds,
            "samples_per_second": self.ranks * self._samples / seconds,
            "fill": self._tokens / max(1, self._budget),
            "padding": 1 - self._tokens / max(1, self._budget),
            "samples_per_pack": self._samples / packs,
            "data_wait": (self._waited() - self._waited_before) / seconds,
            "tokens_seen": self.ranks * self.seen["tokens"],
            "samples_seen": self.ranks * self.seen["samples"],
            **self._became(),
        }
        if self.flops is not None and self.peak:
            rates["mfu"] = self._flops / seconds / self.peak
        for source, pairs in sorted(self._by_source.items()):
            total, count = torch.stack(pairs).sum(0).tolist()
            rates[f"loss_source_{source}"] = total / max(1.0, count)
        return rates
