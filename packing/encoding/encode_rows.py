"""Rows to samples with their places: a row that cannot be used is an error that says where."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ..planning.overflow import too_long
from ..sample import Sample
from ..sources.source import Row, RowError
from .encoder import Encoder
from .report import SkippedRows


def encoded(
    rows: Sequence[Row], encoder: Encoder, longest: int | None = None, source: int = 0
) -> list[Sample | RowError]:
    """Give the sample of each row, or why there is none.

    longest: a sample of more tokens is refused, whether or not bad rows are.
    """
    good = [row.value for row in rows if not isinstance(row.value, ValueError)]
    samples, out = iter(encoder.encode(good)), []
    for row in rows:
        one = row.value if isinstance(row.value, ValueError) else next(samples)
        if not isinstance(one, Sample):
            out.append(RowError(row.where, one))
            continue
        if longest is not None and len(one) > longest:
            raise too_long(row.where, len(one), longest)
        out.append(replace(one, source=source) if source else one)
    return out


def samples_of(found: Iterable[Sample | RowError], skipped: SkippedRows | None) -> Iterator[Sample]:
    """Give the samples; count the errors, or raise the first."""
    for one in found:
        if isinstance(one, Sample):
            yield one
        elif skipped is None:
            raise one
        else:
            skipped.add(one)
