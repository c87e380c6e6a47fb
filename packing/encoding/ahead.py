"""Encode a small source at once, so that its lengths are known and everything can be planned.

What cannot be used is left out here, if the user said so, and counted.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np

from ..sources.source import RowError, RowSource
from ..sources.token_store import TokenArray
from .encode_rows import encoded, samples_of
from .encoder import Encoder
from .report import SkippedRows

SMALL = 64 << 20
"""Bytes up to which files are encoded ahead."""
BATCH = 256


def encode_ahead(
    source: RowSource,
    encoder: Encoder,
    skipped: SkippedRows | None,
    number: int = 0,
    longest: int | None = None,
) -> TokenArray:
    """Read and encode every row of a source."""
    rows, samples = source.read(0, 1), []
    while batch := list(islice(rows, BATCH)):
        samples += samples_of(encoded(batch, encoder, longest), skipped)
    return TokenArray.of(samples, source.name, number)


def filled(
    shelves: list[TokenArray], skipped: SkippedRows, limit: int | None = None
) -> list[TokenArray]:
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
