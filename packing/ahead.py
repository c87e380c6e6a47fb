"""Encode a small source at once, so that its lengths are known and everything can be planned.

What cannot be used is left out here, if the user said so, and counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from .encoder import Encoder
from .overflow import too_long
from .sample import Sample
from .sources.source import Row, RowError, RowSource
from .token_store import Shelf

SMALL = 64 << 20
"""Bytes up to which files are encoded ahead."""
BATCH = 256


@dataclass(slots=True)
class Skipped:
    """Rows that were left out, and why the first of them were."""

    rows: int = 0
    reasons: list[str] = field(default_factory=list)

    def add(self, error: RowError) -> None:
        """Count one."""
        self.rows += 1
        if len(self.reasons) < 20:
            self.reasons.append(f"{error.where}: {error.reason}")


def encoded(
    rows: list[Row], encoder: Encoder, skipped: Skipped | None, longest: int | None = None
) -> Iterator[tuple[int, Sample]]:
    """Give (place, sample) of the good rows; count the bad ones, or raise at the first.

    longest: a sample of more tokens is refused, whether or not bad rows are.
    """
    good = [row.value for row in rows if not isinstance(row.value, ValueError)]
    samples = iter(encoder.encode(good))
    for place, row in enumerate(rows):
        sample = row.value if isinstance(row.value, ValueError) else next(samples)
        if isinstance(sample, Sample):
            if longest is not None and len(sample) > longest:
                raise too_long(row.where, len(sample), longest)
            yield place, sample
            continue
        error = RowError(row.where, sample)
        if skipped is None:
            raise error
        skipped.add(error)


def encode_ahead(
    source: RowSource,
    encoder: Encoder,
    skipped: Skipped | None,
    number: int = 0,
    longest: int | None = None,
) -> Shelf:
    """Read and encode every row of a source."""
    rows, samples = source.read(0, 1), []
    while batch := list(islice(rows, BATCH)):
        samples += [sample for _, sample in encoded(batch, encoder, skipped, longest)]
    return Shelf.of(samples, source.name, number)


def filled(shelves: list[Shelf], skipped: Skipped, limit: int | None = None) -> list[Shelf]:
    """Leave out the documents that are empty, or hold ids outside the vocabulary; counted."""
    first, kept = 0, []
    for shelf in shelves:
        keep = shelf.sound(limit)
        for number in np.flatnonzero(~keep).tolist():
            empty = shelf.lengths[number] == 0
            why = "it is empty or holds nulls" if empty else "an id is outside the vocabulary"
            skipped.add(RowError(f"{shelf.name}, document {first + number}", why))
        first += len(keep)
        if not keep.all():
            shelf = replace(shelf, begins=shelf.begins[keep], lengths=shelf.lengths[keep])
        kept.append(shelf)
    return kept
