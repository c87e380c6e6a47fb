"""The packer: samples in, packs out, in a stream, with bounded memory.

    packer = Packer(budget=8192)
    for sample in samples:
        for pack in packer.add([sample]): ...
    for pack in packer.finish(): ...

It holds the samples that wait for their pack, at most `pool` of them. Its state is which ones
those are, by number: the tokens are read again from wherever they came.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from ..pack import Pack
from ..sample import IGNORE_INDEX, Sample
from .overflow import Counts, Overflow
from .plan import Plan
from .planner import Planner, Strategy


class Packer:
    """Packs samples as they come; see `Planner` for what the settings mean.

    continue_positions: the parts of a split sample continue its positions instead of restarting;
    only for attention that is given the boundaries, since stock ones take a restart for one.

    >>> packer = Packer(budget=8, pool=4)
    >>> samples = [Sample(np.arange(1, n + 1)) for n in (5, 6, 3, 2)]
    >>> [pack.lengths.tolist() for pack in packer.add(samples)]
    [[5, 3], [6, 2]]
    """

    def __init__(
        self,
        budget: int,
        *,
        pool: int = 1024,
        strategy: Strategy = "best_fit",
        overflow: Overflow = "split",
        align: int = 1,
        continue_positions: bool = False,
        pad: int = 0,
    ):
        self.planner = Planner(budget, pool=pool, strategy=strategy, overflow=overflow, align=align)
        self.continue_positions, self.pad = continue_positions, pad
        self.held: dict[int, Sample] = {}
        """The samples that wait, wholly or in part, by number of arrival."""
        self._waiting: dict[int, int] = {}

    @property
    def counts(self) -> Counts:
        """What was packed, split, truncated and dropped so far."""
        return self.planner.counts

    def add(self, samples: Iterable[Sample]) -> Iterator[Pack]:
        """Take the next samples; give the packs that are decided now."""
        samples, first = list(samples), self.counts.items
        for number, sample in enumerate(samples, first):
            if not isinstance(sample, Sample):
                raise ValueError(f"sample {number} is a {type(sample).__name__}: make it a Sample")
        plan = self.planner.feed(np.array([len(sample) for sample in samples], np.int64))
        for number, sample in enumerate(samples, first):
            self._hold(number, sample)
        return self._packs(plan)

    def finish(self) -> Iterator[Pack]:
        """Give the packs of everything that still waits."""
        return self._packs(self.planner.finish())

    def _hold(self, number: int, sample: Sample) -> None:
        waiting, room = len(sample), self.planner.room
        if waiting > room:
            waiting = {"truncate": room, "drop": 0}.get(self.planner.settings["overflow"], waiting)
        if waiting:
            self.held[number], self._waiting[number] = sample, waiting

    def _packs(self, plan: Plan) -> Iterator[Pack]:
        # Samples leave `held` now, not when the caller comes to their pack: a state that is
        # taken in between must name what the planner holds, and nothing else.
        samples = {number: self.held[number] for number in plan.items.tolist()}
        for number, length in zip(plan.items.tolist(), plan.lengths.tolist(), strict=True):
            self._waiting[number] -= length
            if not self._waiting[number]:
                del self.held[number], self._waiting[number]
        wholes = _wholes(plan, samples) if self.planner.settings["overflow"] == "split" else None
        return (self._pack(plan, plan.segments(p), samples, wholes) for p in range(len(plan)))

    def _pack(
        self,
        plan: Plan,
        segments: slice,
        samples: Mapping[int, Sample],
        wholes: np.ndarray | None,
    ) -> Pack:
        budget, align = self.planner.settings["budget"], self.planner.settings["align"]
        numbers, starts = plan.items[segments], plan.starts[segments]
        lengths = plan.lengths[segments]
        widths = -(-lengths // align) * align
        bounds = np.concatenate([[0], np.cumsum(widths)]).astype(np.int32)
        tokens = np.full(bounds[-1], self.pad, np.int64)
        labels = np.full(bounds[-1], IGNORE_INDEX, np.int64)
        sources = np.empty(len(numbers), np.int16)
        triples = zip(numbers.tolist(), starts.tolist(), lengths.tolist(), strict=True)
        for place, (number, start, length) in enumerate(triples):
            sample, at = samples[number], int(bounds[place])
            tokens[at : at + length] = sample.tokens[start : start + length]
            labels[at + 1 : at + length] = sample.labels[start + 1 : start + length]
            sources[place] = sample.source
        first_positions = starts.copy() if self.continue_positions else np.zeros_like(starts)
        pack = Pack(tokens, labels, bounds, budget, numbers, sources, first_positions)
        if wholes is not None and wholes[segments].any():
            pack.wholes = wholes[segments]
        return pack

    def state_dict(self) -> dict:
        """Give what is needed to continue, without a single token."""
        return {
            "planner": self.planner.state_dict(),
            "waiting": [[number, self._waiting[number]] for number in sorted(self._split())],
        }

    def _split(self) -> list[int]:
        return [n for n, sample in self.held.items() if self._waiting[n] != len(sample)]

    def load_state_dict(self, state: dict, samples: Mapping[int, Sample]) -> None:
        """Continue from a state; `samples` are the held ones, by number, read again."""
        self.planner.load_state_dict(state["planner"])
        waiting = dict(state["waiting"])
        self.held = dict(samples)
        self._waiting = {n: waiting.get(n, len(sample)) for n, sample in samples.items()}
        self._check_lengths()

    def _check_lengths(self) -> None:
        """Refuse samples that are no longer as long as they were: the data changed meanwhile."""
        known, held = self._waiting.copy(), self.planner.held
        for number, start, length in zip(*(own.tolist() for own in held.columns), strict=True):
            known[number] -= length
            if start + length > len(self.held[number]):
                known[number] = -1
        wrong = next((number for number, left in known.items() if left), None)
        if wrong is not None:
            raise ValueError(
                f"sample {wrong} has {len(self.held[wrong])} tokens, another number than when the "
                "state was made: the data has changed, or how it is tokenized"
            )


def _wholes(plan: Plan, samples: Mapping[int, Sample]) -> np.ndarray | None:
    """Give for parts how many tokens count in the whole sample, else 0; None if there are none."""
    numbers = plan.items.tolist()
    split = plan.lengths < [len(samples[number]) for number in numbers]
    if not split.any():
        return None
    labels = {number: samples[number].labels for number in plan.items[split].tolist()}
    counted = {number: np.count_nonzero(own != IGNORE_INDEX) for number, own in labels.items()}
    return np.array([counted.get(number, 0) for number in numbers], np.int64)
