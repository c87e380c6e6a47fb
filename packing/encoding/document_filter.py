"""Drop and count the invalid documents of ready tokens, for `on_error="skip"`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..sources.document_checks import documents_in_range, documents_unshifted
from ..sources.remote import RemoteTokens
from ..sources.source import RowError
from ..sources.token_store import TokenArray
from ..token_ids import MAX_TOKEN_ID
from .report import SkippedRows


def drop_bad_documents(
    arrays: list[TokenArray], skipped: SkippedRows, vocab_size: int | None = None
) -> list[TokenArray]:
    """Remove and count documents that are empty, or have invalid ids or shifted labels."""
    first, filtered = 0, []
    for array in arrays:
        in_range, unshifted = _in_range(array, vocab_size), _unshifted(array)
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
            targets = [t for t, is_valid in zip(array.targets, valid, strict=False) if is_valid]
            kept = array.begins[valid], array.lengths[valid]
            array = replace(array, begins=kept[0], lengths=kept[1], targets=targets)
        filtered.append(array)
    return filtered


def _in_range(array: TokenArray, vocab_size: int | None) -> np.ndarray:
    """bool [n]: which documents have tokens, and only ids from 0 to below the vocab size."""
    array.check_file()
    limit = MAX_TOKEN_ID + 1 if vocab_size is None else vocab_size
    begins = np.asarray(array.begins)
    ends = begins + array.lengths
    valid = array.lengths > 0
    if isinstance(array.flat, RemoteTokens):
        for some, flat, first in array.flat.documents(begins, ends):
            bounds = begins[some] - first, ends[some] - first
            valid[some] &= documents_in_range(flat, *bounds, limit, False)
    elif len(array.flat):
        valid &= documents_in_range(array.flat, begins, ends, limit, False)
    if array.labels is not None and len(array.labels):
        valid &= documents_in_range(array.labels, begins, ends, limit, True)
    return valid


def _unshifted(array: TokenArray) -> np.ndarray:
    """bool [n]: which documents have labels that are their own tokens."""
    if array.labels is None:
        return np.ones(len(array.lengths), bool)
    begins = np.asarray(array.begins)
    return documents_unshifted(array.flat, array.labels, begins, begins + array.lengths)
