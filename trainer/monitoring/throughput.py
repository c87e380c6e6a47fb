"""Training throughput: tokens/s, samples/s, fill, MFU, data wait; loss and tokens by source.

meter = ThroughputMeter.of(loader, model)
for batch in loader:
    ...
    meter.add(loader.last_pack)
meter.read()     {"tokens_per_second": ..., "fill": ..., "mfu": ..., ...} since the last reset

Evaluations run inside `meter.paused()`, so that their time does not count in the rates.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...packing import IGNORE_INDEX
from ...runtime import sum_over_ranks, world_size
from ..data.loader import PackedLoader, PackInfo
from .flops import ModelFlops, peak_flops

if TYPE_CHECKING:
    from torch import Tensor

OF_TRAINING = ("loss", "learning_rate", "grad_norm", "epoch")
"""Values of the training in trackers; all others are about its packs."""


class ThroughputMeter:
    """Count trained packs; read the rates since the last reset.

    >>> meter = ThroughputMeter(ranks=2)
    >>> meter.seconds = lambda: 2.0
    >>> meter.add(PackInfo(0, {}, 10, np.array([4, 5]), 7, 7))
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
        wait_seconds: Callable[[], float] | None = None,
        overflow_counts: Callable[[], dict[str, int]] | None = None,
        by_source: bool = True,
        source_names: Sequence[str] = (),
    ):
        """Configure what is measured.

        Args:
            ranks: number of data-parallel ranks; rates are multiplied by it.
            flops: the FLOPs of the model, for the MFU.
            peak: the peak FLOP/s of the devices that train one pack, for the MFU.
            wait_seconds: returns the seconds of waiting for data: `PackedLoader.wait_seconds`.
            overflow_counts: returns the samples split, truncated and dropped, see
                `PackedLoader.overflow_counts`.
            by_source: report tokens by source, and the loss if token losses are added.
            source_names: the names of the sources: `PackedDataset.source_names`.
        """
        self.ranks, self.by_source, self.source_names = ranks, by_source, source_names
        self.flops, self.peak = flops, peak
        self._wait_seconds = wait_seconds or (lambda: 0.0)
        self._overflow_counts = overflow_counts or dict
        self._source_losses: dict[int, list[Tensor]] = {}
        self._pause_depth = 0
        self.seen = {"tokens": 0, "samples": 0, "packs": 0}
        """Totals of this rank since the start."""
        self._tokens_seen_of: Counter[int] = Counter()
        """Tokens of each source since the start."""
        self.reset()

    @classmethod
    def of(cls, loader: PackedLoader, model: Any) -> ThroughputMeter:
        """Measure the training of a causal LM, the `model`, on a `loader`'s batches."""
        packs, peak = loader.packs_at_a_time, peak_flops(next(model.parameters()).device)
        return cls(
            packs,
            flops=ModelFlops.from_model(model),
            peak=None if peak is None else peak * max(1, world_size() // packs),
            wait_seconds=lambda: loader.wait_seconds,
            overflow_counts=loader.overflow_counts,
            by_source=loader.dataset.settings["weights"] is not None,
            source_names=loader.dataset.source_names,
        )

    def reset(self) -> None:
        """Start a new measurement."""
        self._start, self._wait_start = time.perf_counter(), self._wait_seconds()
        self._paused_seconds = 0.0
        self._packs = self._tokens = self._budget = self._samples = 0
        self._flops = 0.0
        self._tokens_of: Counter[int] = Counter()
        self._source_losses.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside from the rates; calls may be nested."""
        start = time.perf_counter()
        self._pause_depth += 1
        try:
            yield
        finally:
            self._pause_depth -= 1
            if not self._pause_depth:
                self._paused_seconds += time.perf_counter() - max(start, self._start)

    def seconds(self) -> float:
        """Return the seconds of training since the last reset, without pauses."""
        return time.perf_counter() - self._start - self._paused_seconds

    def add(
        self, info: PackInfo, labels: Tensor | None = None, token_losses: Tensor | None = None
    ) -> None:
        """Count one trained pack, and its token losses by source if they are passed.

        Args:
            info: the pack, as in `PackedLoader.last_pack`.
            labels: the labels of its batch.
            token_losses: the loss of each label, as in `AttachedLoss.token_losses`.
        """
        tokens, samples = int(np.sum(info.lengths)), len(info.lengths)
        self._packs += 1
        self._tokens += tokens
        self._budget += info.budget
        self._samples += samples
        for name, count in (("tokens", tokens), ("samples", samples), ("packs", 1)):
            self.seen[name] += count
        if self.flops is not None:
            self._flops += self.flops.step_flops(info.lengths)
        if self.by_source:
            for source in np.unique(info.sources).tolist():
                count = int(info.lengths[info.sources == source].sum())
                self._tokens_of[source] += count
                self._tokens_seen_of[source] += count
        if self.by_source and labels is not None and token_losses is not None:
            self._add_losses(info, labels.to(token_losses.device), token_losses)

    def _add_losses(self, info: PackInfo, labels: Tensor, token_losses: Tensor) -> None:
        """Add each label's loss to the source of its sample, without a host sync."""
        lengths = np.ones_like(info.lengths) if token_losses.ndim == 1 else info.lengths
        sources = torch.from_numpy(np.repeat(info.sources, lengths).astype(np.int64))
        sources = sources.to(labels.device, non_blocking=True)
        losses, labels = token_losses.flatten()[: len(sources)], labels.flatten()[: len(sources)]
        counted = (labels != IGNORE_INDEX).float()
        for source in np.unique(info.sources).tolist():
            mask = counted * (sources == source)
            loss_and_count = torch.stack([(losses * mask).sum(), mask.sum()])
            self._source_losses.setdefault(source, []).append(loss_and_count)

    def read(self) -> dict[str, float]:
        """Return the rates and totals over all ranks, extrapolated from this rank's packs."""
        seconds, packs = max(self.seconds(), 1e-9), max(1, self._packs)
        rates = {
            "tokens_per_second": self.ranks * self._tokens / seconds,
            "samples_per_second": self.ranks * self._samples / seconds,
            "fill": self._tokens / max(1, self._budget),
            "padding": 1 - self._tokens / max(1, self._budget),
            "samples_per_pack": self._samples / packs,
            "data_wait": (self._wait_seconds() - self._wait_start) / seconds,
            "tokens_seen": self.ranks * self.seen["tokens"],
            "samples_seen": self.ranks * self.seen["samples"],
            **self._overflow_counts(),
        }
        if self.flops is not None and self.peak:
            rates["mfu"] = self._flops / seconds / self.peak
        return {**self._read_sources(), **rates}

    def totals(self) -> dict[str, float]:
        """Return the tokens and samples since the start, summed over ranks: call it on all ranks.

        `read` extrapolates these values, so that it may be called on one rank alone.
        """
        sources = self.source_names if self.by_source else ()
        counts = [self.seen["tokens"], self.seen["samples"]]
        counts += [self._tokens_seen_of[source] for source in range(len(sources))]
        readers = max(1, world_size() // self.ranks)  # ranks that read the same packs
        names = ["tokens_seen", "samples_seen", *(f"tokens_{name}" for name in sources)]
        sums = sum_over_ranks(torch.tensor(counts)) / readers
        return dict(zip(names, map(round, sums.tolist()), strict=True))

    def _read_sources(self) -> dict[str, float]:
        """Return the tokens, share of tokens and loss of each source."""
        values: dict[str, float] = {}
        names = dict(enumerate(self.source_names))
        for source in sorted({*names, *self._tokens_seen_of}) if self.by_source else ():
            name = names.get(source, f"source_{source}")
            values[f"tokens_{name}"] = self.ranks * self._tokens_seen_of[source]
            values[f"share_{name}"] = self._tokens_of[source] / max(1, self._tokens)
        for source, losses_and_counts in sorted(self._source_losses.items()):
            total, count = torch.stack(losses_and_counts).sum(0).tolist()
            values[f"loss_{names.get(source, f'source_{source}')}"] = total / max(1.0, count)
        return values


def tracker_tags(values: Mapping[str, Any]) -> dict[str, Any]:
    """Name the values of a training step, and the rates of a `ThroughputMeter`, for trackers.

    The names are the same in all front ends.

    >>> tracker_tags({"loss": 2.5, "fill": 0.99})
    {'train/loss': 2.5, 'pack/fill': 0.99}
    """
    return {
        f"{'train' if name in OF_TRAINING else 'pack'}/{name}": value
        for name, value in values.items()
    }
