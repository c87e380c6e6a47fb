"""Estimate the packs of an unread stream, or the report of a long plan, from a few documents.

    first rows of a source ─▶ tokens of a row ─┐
    rows of it, or its bytes ─▶ rows ──────────┴─▶ lengths of a shard ─▶ planned packs · shards

The lengths of a shard are those of the first rows, repeated: the more the other rows differ, the
less exact is the estimate.
"""

from __future__ import annotations

from itertools import islice, pairwise
from math import ceil

import numpy as np

from ..encoding.report import SkippedRows, build_report
from ..ordering.mixture import estimate_epoch
from ..planning.overflow import kept_lengths
from ..planning.planner import Planner
from ..sample import Sample
from ..sources.source import RowSource
from .planned import PlannedPacks
from .shard_reader import StreamSettings

FIRST_ROWS = 256
"""Rows of each source that are read."""
MAX_PLANNED = 1 << 14
"""Documents that are planned; more are extrapolated."""


def estimate_packs(settings: StreamSettings) -> int | None:
    """Estimate the packs of an epoch; None if the size of a source is unknown."""
    lengths, counts = [], []
    for source in settings.sources:
        found = _first_lengths(source, settings)
        if found is None:
            return None
        lengths.append(found[0])
        counts.append(found[1])
    kept = [kept_lengths(each, settings.packer).sum() for each in lengths]
    tokens = [each * count for each, count in zip(kept, counts, strict=True)]
    drawn = estimate_epoch(tokens, settings.weights, settings.stopping_strategy)
    laps = drawn / np.maximum(1, tokens)
    counts = [count * lap / settings.shards for count, lap in zip(counts, laps, strict=True)]
    total = sum(len(each) * count for each, count in zip(lengths, counts, strict=True))
    share = min(1.0, MAX_PLANNED / max(total, 1))
    documents = np.concatenate([
        np.resize(each, ceil(len(each) * count * share))
        for each, count in zip(lengths, counts, strict=True)
    ])  # fmt: skip
    np.random.default_rng(0).shuffle(documents)
    return round(_planned_packs(documents, settings) / share * settings.shards)


def _planned_packs(documents: np.ndarray, settings: StreamSettings) -> int:
    options = settings.planner
    if options["overflow"] == "error":  # raised when it is read, unless errors are skipped
        options["overflow"] = "drop"
    planner = Planner(**options)
    planner.feed(documents)
    planner.finish()
    return planner.counts.packs


def _first_lengths(source: RowSource, settings: StreamSettings) -> tuple[np.ndarray, float] | None:
    """Return the lengths of the first rows, and the size of the source as a multiple of them."""
    num_rows = source.num_rows()
    if num_rows is None and source.num_bytes is None:
        return None  # it may be an iterator, which can be read only once
    rows = [row.value for row in islice(source.read(0, 1), FIRST_ROWS)]
    samples = settings.encoder.encode([row for row in rows if not isinstance(row, Exception)])
    lengths = np.array([len(each) for each in samples if isinstance(each, Sample)], np.int64)
    if not lengths.size:
        return None
    if num_rows is not None:
        return lengths, num_rows / len(rows)
    return lengths, max(1.0, (source.num_bytes or 0) / sum(map(source.row_bytes, rows)))


def estimate_report(packs: PlannedPacks, max_documents: int) -> dict | None:
    """Report the first documents of a plan, with shares, laps and `epoch_packs` of the full epoch.

    Returns None if an epoch has no more documents than these.
    """
    store, settings = packs.store, packs.settings
    weights = settings.weights
    bounds = store.source_bounds(len(weights))
    kept = [kept_lengths(store.lengths[a:b], settings.packer) for a, b in pairwise(bounds)]
    tokens = np.array([each.sum(dtype=np.int64) for each in kept])
    drawn = estimate_epoch(tokens, weights, settings.stopping_strategy)
    laps = drawn / np.maximum(1, tokens)
    if laps @ np.diff(bounds) <= max_documents:
        return None
    for _ in packs.plans(0, max_documents=max_documents):
        pass
    report = build_report(packs.counts, drawn.tolist(), SkippedRows(), settings.budget)
    epoch_packs = round(packs.counts.packs * drawn.sum() / max(1, packs.counts.packed_tokens))
    return {**report, "epoch_packs": epoch_packs, "laps": laps.tolist()}
