"""The packer: samples to packs, as a stream with bounded memory.

    packer = Packer(budget=8192)
    for sample in samples:
        for pack in packer.add([sample]): ...
    for pack in packer.finish(): ...

It holds the samples that have no pack yet, at most `pool` of them. Its state names these samples
by number; a resume reads their tokens again from the source.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ..argument_checks import check_flags, check_ints
from ..images import check_uncut
from ..pack import Pack
from ..sample import IGNORE_INDEX, Sample
from ..targets import cut_targets
from ..token_ids import MAX_TOKEN_ID
from .overflow import Overflow
from .planner import Counts, Plan, Planner, Strategy, planner_settings
from .share_order import order_by_shares


class Packer:
    """Packs samples as they arrive.

    Args:
        budget: tokens that a pack may hold.
        pool: samples that best_fit chooses from; fewer than this many wait for a pack.
        strategy: "best_fit", "sequential" or "concat", as in `Planner`.
        overflow: what happens to a sample longer than a pack: "split", "truncate", "drop" or
            "error".
        max_length: the longest sequence, if shorter than a pack; `overflow` applies to longer ones.
        pad_to_multiple_of: every sample occupies a multiple of this many tokens in its pack.
        continue_positions: the parts of a split sample continue its positions instead of
            restarting; only for attention that receives the boundaries, since stock
            implementations infer a boundary from a restart of positions.
        pad_token_id: id of the padding of `pad_to_multiple_of`; the loss ignores it.

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
        pad_to_multiple_of: int = 1,
        max_length: int | None = None,
        continue_positions: bool = False,
        pad_token_id: int = 0,
    ):
        settings = packer_settings(
            budget=budget, pool=pool, strategy=strategy, overflow=overflow, max_length=max_length,
            pad_to_multiple_of=pad_to_multiple_of, pad_token_id=pad_token_id,
            continue_positions=continue_positions,
        )  # fmt: skip
        self.continue_positions = settings.pop("continue_positions")
        self.pad_token_id = settings.pop("pad_token_id")
        self.planner = Planner(**settings)
        self.pending: dict[int, Sample] = {}
        """The samples that are pending at least in part, by number of arrival."""
        self._pending_tokens: dict[int, int] = {}
        self.packed_counts = Counts()
        """Counts of the packs that were taken from `add` and `finish`, and of the samples that
        begin in them; dropped samples count when they arrive."""
        self.last_lengths = np.zeros(0, np.int64)
        """Tokens of each sequence of the last of these packs, without padding."""

    @property
    def counts(self) -> Counts:
        """Counts of samples that have arrived, and of all packs decided so far."""
        return self.planner.counts

    def add(self, samples: Iterable[Sample]) -> Iterator[Pack]:
        """Take the next samples; return the packs that are decided now."""
        samples, first = list(samples), self.counts.items
        for number, sample in enumerate(samples, first):
            if not isinstance(sample, Sample):
                raise ValueError(f"sample {number} is a {type(sample).__name__}: pass a Sample")
        plan = self.planner.feed(np.array([len(sample) for sample in samples], np.int64))
        for number, sample in enumerate(samples, first):
            self._hold(number, sample)
        return self._packs(plan)

    def flush(self) -> Iterator[Pack]:
        """Return the packs of the pending samples, except the emptiest.

        They come in an order that keeps the sources' shares even.
        """
        plan = self.planner.flush()
        sources = np.array([self.pending[n].source for n in plan.items.tolist()], np.int64)
        budget = self.planner.settings["budget"]
        return self._packs(order_by_shares(plan, sources, int(sources.max(initial=0)) + 1, budget))

    def finish(self) -> Iterator[Pack]:
        """Return the packs of all pending samples."""
        return self._packs(self.planner.finish())

    def _hold(self, number: int, sample: Sample) -> None:
        tokens, longest = len(sample), self.planner.max_segment
        if tokens > longest:
            tokens = {"truncate": longest, "drop": 0}.get(self.planner.settings["overflow"], tokens)
        if tokens:
            self.pending[number], self._pending_tokens[number] = sample, tokens

    def _packs(self, plan: Plan) -> Iterator[Pack]:
        # Samples leave `pending` now, not when the caller reaches their pack: a state taken in
        # between must name exactly the samples that the planner holds.
        samples = {number: self.pending[number] for number in plan.items.tolist()}
        for number, length in zip(plan.items.tolist(), plan.lengths.tolist(), strict=True):
            self._pending_tokens[number] -= length
            if not self._pending_tokens[number]:
                del self.pending[number], self._pending_tokens[number]
        splits = self.planner.settings["overflow"] == "split"
        parent_counts = _parent_label_counts(plan, samples) if splits else None
        return (
            self._pack(plan, plan.segments(p), samples, parent_counts) for p in range(len(plan))
        )

    def _pack(
        self,
        plan: Plan,
        segments: slice,
        samples: Mapping[int, Sample],
        parent_counts: np.ndarray | None,
    ) -> Pack:
        settings = self.planner.settings
        budget, multiple = settings["budget"], settings["pad_to_multiple_of"]
        numbers, starts = plan.items[segments], plan.starts[segments]
        lengths = plan.lengths[segments]
        sizes = -(-lengths // multiple) * multiple
        cu_seqlens = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        tokens = np.full(cu_seqlens[-1], self.pad_token_id, np.int64)
        labels = np.full(cu_seqlens[-1], IGNORE_INDEX, np.int64)
        sources = np.empty(len(numbers), np.int16)
        triples = zip(numbers.tolist(), starts.tolist(), lengths.tolist(), strict=True)
        for i, (number, start, length) in enumerate(triples):
            sample, offset = samples[number], int(cu_seqlens[i])
            tokens[offset : offset + length] = sample.tokens[start : start + length]
            labels[offset + 1 : offset + length] = sample.labels[start + 1 : start + length]
            sources[i] = sample.source
        first_positions = starts.copy() if self.continue_positions else np.zeros_like(starts)
        pack = Pack(tokens, labels, cu_seqlens, budget, numbers, sources, first_positions)
        targets = [samples[number].target for number in numbers.tolist()]
        pack.targets = cut_targets(targets, starts, lengths)
        pack.images = [samples[number].images for number in numbers.tolist()]
        check_uncut(pack.images, lengths)
        if parent_counts is not None and parent_counts[segments].any():
            pack.parent_label_counts = parent_counts[segments]
        begun = [samples[number] for number in numbers[starts == 0].tolist()]
        self._count_pack(lengths, begun)
        return pack

    def _count_pack(self, lengths: np.ndarray, begun: list[Sample]) -> None:
        """Count a pack of sequences of these lengths, in which these samples begin."""
        counts, longest = self.packed_counts, self.planner.max_segment
        cut = [len(sample) - longest for sample in begun if len(sample) > longest]
        if self.planner.settings["overflow"] == "truncate":
            counts.truncated += len(cut)
            counts.truncated_tokens += sum(cut)
        elif not self.planner.cuts_stream:
            counts.split += len(cut)
        self.last_lengths = lengths
        counts.items += len(begun)
        counts.packs += 1
        counts.sequences += len(lengths)
        counts.packed_tokens += int(lengths.sum())
        self.count_dropped()

    def count_dropped(self) -> None:
        """Count the samples that were dropped so far, with the packs made."""
        counts, arrived = self.packed_counts, self.counts
        counts.items += arrived.dropped - counts.dropped
        counts.dropped, counts.dropped_tokens = arrived.dropped, arrived.dropped_tokens
        counts.tokens = counts.packed_tokens + counts.truncated_tokens + counts.dropped_tokens

    def state_dict(self) -> dict:
        """Return what is needed to continue, without any tokens."""
        partial = sorted(self._partly_packed())
        return {
            "planner": self.planner.state_dict(),
            "pending_tokens": [[number, self._pending_tokens[number]] for number in partial],
            "packed_counts": self.packed_counts.as_list(),
        }

    def _partly_packed(self) -> list[int]:
        return [n for n, sample in self.pending.items() if self._pending_tokens[n] != len(sample)]

    def load_state_dict(self, state: dict, samples: Mapping[int, Sample]) -> None:
        """Continue from a `state`; `samples` are the pending ones, by number, read again."""
        self.planner.load_state_dict(state["planner"])
        partial = dict(state["pending_tokens"])
        self.packed_counts = Counts(*state["packed_counts"])
        self.pending = dict(samples)
        self._pending_tokens = {n: partial.get(n, len(sample)) for n, sample in samples.items()}
        self._check_lengths()

    def _check_lengths(self) -> None:
        """Raise if a sample read again has another length than before: the data has changed."""
        unexplained = self._pending_tokens.copy()
        for number, start, length in self.planner.pending.T.tolist():
            unexplained[number] -= length
            if start + length > len(self.pending[number]):
                unexplained[number] = -1
        wrong = next((number for number, tokens in unexplained.items() if tokens), None)
        if wrong is not None:
            raise ValueError(
                f"sample {wrong} has {len(self.pending[wrong])} tokens, a different number than "
                "when the state was made: the data or its tokenization has changed"
            )


def packer_settings(
    *,
    continue_positions: bool,
    pad_token_id: int,
    vocab_size: int | None = None,
    **planner: Any,
) -> dict[str, Any]:
    """Return the settings of a packer as JSON, or raise for one that is out of range.

    vocab_size: the id of padding is below it, if it is known.
    """
    settings = planner_settings(**planner)
    (continue_positions,) = check_flags(continue_positions=continue_positions)
    max_length = settings["max_length"]
    if continue_positions and max_length is not None and settings["overflow"] == "split":
        raise ValueError(
            f"continue_positions=True would continue positions beyond max_length={max_length}: "
            "omit one of them"
        )
    (pad_token_id,) = check_ints(pad_token_id=pad_token_id)
    largest = MAX_TOKEN_ID if vocab_size is None else vocab_size - 1
    if not 0 <= pad_token_id <= largest:
        ids = f"from 0 to {largest}"
        raise ValueError(f"pad_token_id={pad_token_id}: pass an id of the vocabulary, {ids}")
    return {**settings, "continue_positions": continue_positions, "pad_token_id": pad_token_id}


def _parent_label_counts(plan: Plan, samples: Mapping[int, Sample]) -> np.ndarray | None:
    """Return the label count of the full sample for each part, 0 otherwise; None without parts."""
    numbers = plan.items.tolist()
    is_part = plan.lengths < [len(samples[number]) for number in numbers]
    if not is_part.any():
        return None
    labels = {number: samples[number].labels for number in plan.items[is_part].tolist()}
    counts = {number: np.count_nonzero(ids != IGNORE_INDEX) for number, ids in labels.items()}
    return np.array([counts.get(number, 0) for number in numbers], np.int64)
