"""Run the encoder over batches of rows or a whole source; raise or skip bad rows.

A row that cannot be used becomes an error with its location, which is raised or, with
on_error="skip", counted. If a source is encoded at once, its lengths are known and the run can be
planned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice

import numpy as np

from ..planning.overflow import too_long_error
from ..preparation_progress import RowProgress
from ..sample import Sample
from ..sources.source import Row, RowError, RowSource
from ..sources.token_array import TokenArray
from .encoder import Encoder
from .report import SkippedRows

ENCODE_BATCH = 256
"""Rows encoded per call of the tokenizer."""


def encode_rows(
    rows: Sequence[Row], encoder: Encoder, max_length: int | None = None, source: int = 0
) -> list[Sample | RowError]:
    """Return the sample of each row, or the error if it has none.

    max_length: a longer sample raises, also if bad rows are skipped.
    """
    readable = [row.value for row in rows if not isinstance(row.value, ValueError)]
    samples, results = iter(encoder.encode(readable)), []
    for row in rows:
        result = row.value if isinstance(row.value, ValueError) else next(samples)
        if not isinstance(result, Sample):
            results.append(RowError(row.location, result))
            continue
        if max_length is not None and len(result) > max_length:
            raise too_long_error(row.location, len(result), max_length)
        results.append(replace(result, source=source) if source else result)
    return results


def raise_or_skip(
    results: Iterable[Sample | RowError], skipped: SkippedRows | None
) -> Iterator[Sample]:
    """Yield the samples; count the errors in `skipped`, or raise the first if that is None."""
    for result in results:
        if isinstance(result, Sample):
            yield result
        elif skipped is None:
            raise result
        else:
            skipped.add(result)


def encode_source(
    source: RowSource,
    encoder: Encoder,
    skipped: SkippedRows | None,
    number: int = 0,
    max_length: int | None = None,
) -> TokenArray:
    """Read and encode every row of a source; `number` is its index in a mixture."""
    rows, samples = source.read(0, 1), []
    with closing(RowProgress(source)) as progress:
        while batch := list(islice(rows, ENCODE_BATCH)):
            samples += raise_or_skip(encode_rows(batch, encoder, max_length), skipped)
            progress.add([row.value for row in batch])
    return TokenArray.of(samples, source.name, number)


def drop_bad_documents(
    arrays: list[TokenArray], skipped: SkippedRows, vocab_size: int | None = None
) -> list[TokenArray]:
    """Remove and count documents that are empty, or have invalid ids or shifted labels."""
    first, filtered = 0, []
    for array in arrays:
        in_range, unshifted = array.valid_mask(vocab_size), array.unshifted_mask()
        valid = in_range & unshifted
        for number in np.flatnonzero(~valid).tolist():
            reason = "a label is not its own token"
            if not in_range[number]:
                reason = "an id is outside the vocabulary"
            if array.lengths[number] == 0:
                reason = "it is empty or has nulls"
            skipped.add(RowError(f"{array.name}, document {first + number}", reason))
        first += len(valid)
        if not valid.all():
            array = replace(array, begins=array.begins[valid], lengths=array.lengths[valid])
        filtered.append(array)
    return filtered
