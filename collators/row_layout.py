"""Copy packs into flat arrays (tokens, labels, positions, cu_seq_lens) with a compiled loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from ..packing import IGNORE_INDEX, Pack, Sample, check_masks, jit, make_sample, row_inner_starts

MAX_TOKEN_ID = 2**31 - 1


def is_integer(value: Any, minimum: int) -> bool:
    """Whether a value is an integer of Python or NumPy, of at least this size."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return False
    return minimum <= int(value) <= MAX_TOKEN_ID


def check_pad_token_id(pad_token_id: Any) -> None:
    """Raise for what is no token id."""
    if not is_integer(pad_token_id, 0):
        raise ValueError(
            f"pad_token_id={pad_token_id!r}: pass any id of the vocabulary, such as 0; the loss "
            "ignores padding"
        )


def as_samples(rows: Iterable[Sample | Mapping[str, Any]]) -> list[Sample]:
    """Convert a trainer's feature dicts to samples, with the same checks as packing.

    A row that is packed already is cut into its documents.

    >>> row = {"input_ids": [5, 6, 7, 8, 9], "seq_lengths": [3, 2]}
    >>> [sample.tokens.tolist() for sample in as_samples([row])]
    [[5, 6, 7], [8, 9]]
    """
    return [sample for row in rows for sample in _documents(row)]


def _documents(row: Any) -> list[Sample]:
    if isinstance(row, Sample):
        return [row]
    if isinstance(row, Pack):
        raise ValueError("a Pack is not a sample: PackedCollator takes packs, if all are packs")
    if not isinstance(row, Mapping):
        raise ValueError(f"a row must be a dict with `input_ids`, got {type(row).__name__}")
    if "input_ids" not in row:
        raise ValueError(f"a row needs `input_ids`, got the keys {sorted(row)}")
    check_masks(row)
    _check_labels(row)
    sample = make_sample(row["input_ids"], row.get("labels"))
    starts = row_inner_starts(row, len(sample))
    if not len(starts):
        return [sample]
    pairs = zip(np.split(sample.tokens, starts), np.split(sample.labels, starts), strict=True)
    return [Sample(tokens, labels) for tokens, labels in pairs]


def _check_labels(row: Mapping[str, Any]) -> None:
    """Refuse labels of classifiers, which are dropped otherwise: a pack has labels of tokens."""
    for name in ("label", "label_ids"):
        if row.get(name) is not None:
            raise ValueError(
                f"a row has `{name}`, the label of a document, but packs have `labels`, one for "
                "each token: remove the column; to train a classifier, collate with Transformers' "
                "DataCollatorWithPadding"
            )


def lay_out_rows(
    packs: Sequence[Pack],
    widths: Sequence[int],
    pad_token_id: int,
    max_sequences: int | None = None,
) -> tuple[np.ndarray, np.ndarray, int]:
    """Concatenate packs, each padded to its width by one sequence that the loss ignores.

    Returns tokens, labels and positions in one array [3, 1, T], the boundaries, and the length of
    the longest sequence. With `max_sequences`, empty sequences are appended up to that number.

    >>> pack = Pack.of([Sample(np.array([5, 6, 7]))], budget=5)
    >>> rows, cu_seq_lens, longest = lay_out_rows([pack], [5], pad_token_id=0)
    >>> rows[:, 0].tolist(), cu_seq_lens.tolist(), longest
    ([[5, 6, 7, 0, 0], [-100, 6, 7, -100, -100], [0, 1, 2, 0, 1]], [0, 3, 5], 3)
    """
    sequences = total = 0
    for pack, width in zip(packs, widths, strict=True):
        sequences += len(pack.samples) + (len(pack.tokens) < width)
        total += width
    if max_sequences is not None and sequences > max_sequences:
        raise ValueError(
            f"a batch has {sequences} sequences, but fixed_sequences={max_sequences}: raise it, "
            "budget / shortest sample is safe"
        )
    rows = np.empty((3, 1, total), np.int64)
    cu_seq_lens = np.empty((max_sequences or sequences) + 1, np.int32)
    end = sequence = longest = 0
    for pack, width in zip(packs, widths, strict=True):
        tokens, labels = pack.tokens, pack.explicit_labels
        start, end = end, end + width
        sequence, longest = _copy_pack(
            tokens,
            tokens if labels is None else labels,
            pack.cu_seqlens,
            pack.first_positions,
            (start, end, sequence, longest, pad_token_id),
            rows,
            cu_seq_lens,
        )
    return rows, cu_seq_lens, longest


@jit
def _copy_pack(tokens, labels, cu_seqlens, first_positions, offsets, rows, cu_seq_lens):
    """Copy one pack; return the index of its last boundary, and the longest sequence so far."""
    start, end, sequence, longest, pad_token_id = offsets
    used = len(tokens)
    cu_seq_lens[sequence] = start
    row_ids, row_labels = rows[0, 0, start:end], rows[1, 0, start:end]
    row_positions = rows[2, 0, start:end]
    for t in range(used):  # a loop, since assigning slices takes three times as long
        row_ids[t] = tokens[t]
        row_labels[t] = labels[t]
    for n in range(len(first_positions)):
        begin, stop = np.int64(cu_seqlens[n]), np.int64(cu_seqlens[n + 1])
        row_labels[begin] = IGNORE_INDEX
        positions, first = row_positions[begin:stop], first_positions[n]
        for t in range(len(positions)):
            positions[t] = first + t
        sequence += 1
        cu_seq_lens[sequence] = start + stop
        longest = max(longest, stop - begin)
    if start + used < end:
        for t in range(used, end - start):
            row_ids[t], row_labels[t], row_positions[t] = pad_token_id, IGNORE_INDEX, t - used
        sequence += 1
        cu_seq_lens[sequence] = end
        longest = max(longest, end - start - used)
    cu_seq_lens[sequence + 1 :] = end
    return sequence, longest
