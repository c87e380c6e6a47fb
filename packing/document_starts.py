"""Find the documents inside rows that are packed already, by the columns that packers write.

    seq_lengths     [3, 2]            TRL
    cu_seqlens      [0, 3, 5]         varlen kernels, also cu_seq_lens and with _q or _k
    position_ids    [0, 1, 2, 0, 1]   a document begins at 0
    attention_mask  [1, 1, 1, 2, 2]   a document begins where the number changes, also seq_idx,
                                      segment_ids and document_ids

If a packed row were read as one document, each document would attend to those before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

LENGTHS = ("seq_lengths",)
BOUNDS = tuple(f"{name}{end}" for name in ("cu_seqlens", "cu_seq_lens") for end in ("", "_q", "_k"))
NUMBERS = ("attention_mask", "seq_idx", "segment_ids", "document_ids")
POSITIONS = ("position_ids",)
BOUNDARY_COLUMNS = frozenset((*LENGTHS, *BOUNDS, *NUMBERS, *POSITIONS))

Lists = tuple[np.ndarray, np.ndarray]
"""A column of lists: all values in one flat array, and the number of values of each row."""


def inner_starts(columns: Mapping[str, Lists], row_lengths: np.ndarray) -> np.ndarray:
    """int64: where documents begin in the flat tokens of some rows, other than at a row's start.

    columns: the boundary columns of the rows; row_lengths: the tokens of each row.

    >>> inner_starts({"seq_lengths": (np.array([3, 2, 4]), np.array([2, 1]))}, np.array([5, 4]))
    array([3])
    """
    found: dict[str, np.ndarray] = {}
    for name, (values, counts) in columns.items():
        starts = _finder(name)(name, values, counts, row_lengths)
        row_starts = np.cumsum(row_lengths) - row_lengths
        found[name] = np.setdiff1d(starts, row_starts)
    # A plain attention mask or plain positions say nothing about documents inside a row.
    explicit = (*LENGTHS, *BOUNDS)
    cut = {name: starts for name, starts in found.items() if len(starts) or name in explicit}
    names = list(cut)
    for name in names[1:]:
        if not np.array_equal(cut[name], cut[names[0]]):
            raise ValueError(
                f"{names[0]} and {name} disagree on where documents begin: remove one of them"
            )
    return cut[names[0]] if names else np.zeros(0, np.int64)


def row_inner_starts(row: Mapping[str, Any], num_tokens: int) -> np.ndarray:
    """int64: where documents begin in one row, other than at its start."""
    columns: dict[str, Lists] = {}
    for name in BOUNDARY_COLUMNS & row.keys():
        values = row[name]
        if values is None or np.ndim(values) == 0:  # a number, such as the id of the document
            continue
        values = np.asarray(values)
        if values.ndim != 1 or values.dtype.kind not in "iub":
            raise ValueError(f"{name} must be one row of integers, got {values.dtype}")
        columns[name] = values, np.array([len(values)])
    return inner_starts(columns, np.array([num_tokens])) if columns else np.zeros(0, np.int64)


def check_not_packed(row: Mapping[str, Any], num_tokens: int) -> None:
    """Raise if a row has several documents."""
    starts = row_inner_starts(row, num_tokens)
    if len(starts):
        names = ", ".join(sorted(BOUNDARY_COLUMNS & row.keys()))
        raise ValueError(
            f"the row is packed already, {len(starts) + 1} documents by {names}: pass it in a "
            "datasets.Dataset, which is cut into its documents, or pass the rows before packing"
        )


def _finder(name: str) -> Any:
    if name in LENGTHS:
        return _starts_of_lengths
    if name in BOUNDS:
        return _starts_of_bounds
    return _starts_of_positions if name in POSITIONS else _starts_of_numbers


def _starts_of_lengths(name: str, values, counts, row_lengths) -> np.ndarray:
    ends = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    sums = np.diff(ends[np.concatenate([[0], np.cumsum(counts)])])
    if not np.array_equal(sums, row_lengths) or (len(values) and values.min() < 1):
        raise _mismatch(name, sums != row_lengths, "does not add up to the row's tokens")
    return ends[:-1]


def _starts_of_bounds(name: str, values, counts, row_lengths) -> np.ndarray:
    ends = np.cumsum(counts)
    firsts, message = ends - counts, "does not go from 0 up to the row's tokens"
    if (counts < 2).any():
        raise _mismatch(name, counts < 2, message)
    wrong = (values[firsts] != 0) | (values[ends - 1] != row_lengths)
    steps = np.diff(values)
    steps[ends[:-1] - 1] = 1  # from one row to the next
    if wrong.any() or (steps < 1).any():
        raise _mismatch(name, wrong, message)
    row_starts = np.repeat(np.cumsum(row_lengths) - row_lengths, counts)
    return np.delete(values + row_starts, ends - 1)


def _starts_of_numbers(name: str, values, counts, row_lengths) -> np.ndarray:
    _check_counts(name, counts, row_lengths)
    if name == "attention_mask" and not values.all():
        raise ValueError("attention_mask contains 0, so rows are padded: tokenize without padding")
    if not len(values) or values.min() == values.max():
        return np.zeros(0, np.int64)
    return np.flatnonzero(values[1:] != values[:-1]) + 1


def _starts_of_positions(name: str, values, counts, row_lengths) -> np.ndarray:
    _check_counts(name, counts, row_lengths)
    first = (np.cumsum(row_lengths) - row_lengths)[row_lengths > 0]
    starts = np.flatnonzero(values == 0)
    lengths = np.diff(np.append(starts, len(values)))
    from_0 = not values[first].any()
    if not from_0 or (values != np.arange(len(values)) - np.repeat(starts, lengths)).any():
        raise ValueError(
            f"{name} neither count from 0 nor restart at 0: packing counts the positions of every "
            "document from 0; remove the column"
        )
    return starts


def _check_counts(name: str, counts: np.ndarray, row_lengths: np.ndarray) -> None:
    if not np.array_equal(counts, row_lengths):
        raise _mismatch(name, counts != row_lengths, "does not have one entry per token")


def _mismatch(name: str, wrong: np.ndarray, message: str) -> ValueError:
    where = f" of row {int(np.argmax(wrong))}" if len(wrong) > 1 and wrong.any() else ""
    return ValueError(f"{name}{where} {message}: fix it, or remove the column")
