"""Convert the feature dicts that a trainer passes to its collator into samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..packing import (
    Pack,
    Sample,
    add_target,
    check_masks,
    make_sample,
    refuse_images,
    row_inner_starts,
)

LABELS = ("label", "label_ids")
"""Columns with the label of a document, or with one for each token."""


def as_samples(rows: Iterable[Sample | Mapping[str, Any]]) -> list[Sample]:
    """Convert a trainer's feature dicts to samples, with the same checks as packing.

    A row that is packed already is cut into its documents.

    >>> row = {"input_ids": [5, 6, 7, 8, 9], "seq_lengths": [3, 2]}
    >>> [sample.tokens.tolist() for sample in as_samples([row])]
    [[5, 6, 7], [8, 9]]
    >>> as_samples([{"input_ids": [5, 6, 7], "label": 1}])[0].target
    1
    """
    return [sample for row in rows for sample in _documents(row)]


def _documents(row: Any) -> list[Sample]:
    if isinstance(row, Sample):
        return [row]
    if isinstance(row, Pack):
        raise ValueError("a Pack is not a sample: pass PackedCollator either packs or samples")
    if not isinstance(row, Mapping):
        raise ValueError(f"a row must be a dict with `input_ids`, got {type(row).__name__}")
    if "input_ids" not in row:
        raise ValueError(f"a row needs `input_ids`, got the keys {sorted(row)}")
    refuse_images(row)
    check_masks(row)
    sample = make_sample(row["input_ids"], row.get("labels"))
    for name in LABELS:
        if row.get(name) is not None:
            return [add_target(sample, row[name], name)]
    starts = row_inner_starts(row, len(sample))
    if not len(starts):
        return [sample]
    pairs = zip(np.split(sample.tokens, starts), np.split(sample.labels, starts), strict=True)
    return [Sample(tokens, labels) for tokens, labels in pairs]
