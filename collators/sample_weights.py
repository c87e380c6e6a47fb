"""Label weights for a loss that is a mean over samples: one over the labels of the sample."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..packing import IGNORE_INDEX, Pack


def parent_label_counts(
    packs: Sequence[Pack], widths: Sequence[int], num_sequences: int
) -> np.ndarray:
    """int64 [num_sequences]: `Pack.parent_label_counts` of all packs, by sequence of the batch."""
    counts, first = np.zeros(num_sequences, np.int64), 0
    for pack, width in zip(packs, widths, strict=True):
        if pack.parent_label_counts is not None:
            counts[first : first + len(pack.samples)] = pack.parent_label_counts
        first += len(pack.samples) + (len(pack.tokens) < width)
    return counts


def sample_weights(
    labels: np.ndarray, cu_seq_lens: np.ndarray, parent_label_counts: np.ndarray | int = 0
) -> np.ndarray:
    """float32 [T]: each label weighs one over the number of labels of its sample.

    parent_label_counts: that number for sequences that are parts of a sample; 0 for full samples.

    >>> labels, cu_seq_lens = np.array([IGNORE_INDEX, 6, 7, IGNORE_INDEX, 9]), np.array([0, 3, 5])
    >>> sample_weights(labels, cu_seq_lens).tolist()
    [0.0, 0.5, 0.5, 0.0, 1.0]
    >>> sample_weights(labels, cu_seq_lens, parent_label_counts=np.array([0, 4])).tolist()
    [0.0, 0.5, 0.5, 0.0, 0.25]
    """
    is_label = labels != IGNORE_INDEX
    before = np.concatenate([[0], np.cumsum(is_label)])
    own_counts = before[cu_seq_lens[1:]] - before[cu_seq_lens[:-1]]
    counts = np.where(parent_label_counts, parent_label_counts, own_counts)
    weights = 1 / np.maximum(counts, 1, dtype=np.float32)
    return np.repeat(weights, np.diff(cu_seq_lens)) * is_label
