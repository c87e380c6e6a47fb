"""Find documents with ids outside the vocabulary, or labels that are not their own tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..numba_jit import jit
from ..sample import IGNORE_INDEX, check_labels

if TYPE_CHECKING:
    from .token_store import PackedRows, TokenStore


@jit
def documents_in_range(flat, begins, ends, limit, are_labels):
    """Return for each document whether its ids are in 0 .. limit - 1; labels may be ignored."""
    in_range = np.empty(len(begins), np.bool_)
    for d in range(len(begins)):
        smallest = largest = np.int64(0)
        for token in flat[begins[d] : ends[d]]:
            value = np.int64(0) if are_labels and token == IGNORE_INDEX else np.int64(token)
            smallest, largest = min(smallest, value), max(largest, value)
        in_range[d] = smallest >= 0 and largest < limit
    return in_range


@jit
def documents_unshifted(flat, labels, begins, ends):
    """Return for each document whether every label is its own token, or ignored."""
    unshifted = np.empty(len(begins), np.bool_)
    for d in range(len(begins)):
        odd = 0
        for i in range(begins[d], ends[d]):
            odd += (labels[i] != flat[i]) & (labels[i] != IGNORE_INDEX)
        unshifted[d] = odd == 0
    return unshifted


def invalid_error(store: TokenStore, rows: PackedRows, limit: int) -> ValueError:
    """Build the error for a row with an id beyond a limit, or a label that is not its token."""
    name, ids = "id", rows.tokens
    invalid = (ids < 0) | (ids >= limit)
    if not invalid.any():
        name, ids = "label", rows.labels
        invalid = ((ids < 0) | (ids >= limit)) & (ids != IGNORE_INDEX)
    if not invalid.any():
        return _shifted_error(store, rows)
    token = int(np.argmax(invalid))
    segment = int(np.searchsorted(rows.segment_starts, token, side="right")) - 1
    location = store.location(int(rows.documents[segment]))
    return ValueError(
        f"{location} contains the {name} {ids[token]}: ids range from 0 to {limit - 1}; "
        'pass on_error="skip" to skip such documents'
    )


def _shifted_error(store: TokenStore, rows: PackedRows) -> ValueError:
    for document, start, length in zip(
        rows.documents.tolist(), rows.starts.tolist(), rows.lengths.tolist(), strict=True
    ):
        array, tokens = store.locate(document)
        part = slice(tokens.start + start, tokens.start + start + length)
        labels = array.labels_of(part)
        if labels is not None:
            try:
                check_labels(array.flat[part], labels)
            except ValueError as error:
                return ValueError(f"{store.location(document)}: {error}")
    raise AssertionError("all labels are their own tokens")
