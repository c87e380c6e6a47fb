"""Lay packs into flat rows: tokens, labels, positions and boundaries, with no Python per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..packing import IGNORE_INDEX, Pack, Sample, check_masks, checked_sample, jit


def as_sample(row: Sample | Mapping[str, Any]) -> Sample:
    """Read a trainer's feature dict as a sample; what packing would refuse is refused here too."""
    if isinstance(row, Sample):
        return row
    if isinstance(row, Pack):
        raise ValueError("a Pack is no sample: PackedCollator takes packs, and packs alone")
    if not isinstance(row, Mapping):
        raise ValueError(f"a row must be a dict with `input_ids`, got {type(row).__name__}")
    if "input_ids" not in row:
        raise ValueError(f"a row needs `input_ids`, got the keys {sorted(row)}")
    check_masks(row, row.get("attention_mask"))
    return checked_sample(row["input_ids"], row.get("labels"))


def lay_rows(
    packs: Sequence[Pack], widths: Sequence[int], pad_token_id: int, room: int | None = None
) -> tuple[np.ndarray, np.ndarray, int]:
    """Lay packs end to end, each filled up to its width by one sequence that counts nothing.

    Gives tokens, labels and positions in one array [3, 1, T], the boundaries, and the length of
    the longest sequence. With `room`, empty sequences follow up to this many.

    >>> pack = Pack.of([Sample(np.array([5, 6, 7]))], budget=5)
    >>> rows, bounds, longest = lay_rows([pack], [5], pad_token_id=0)
    >>> rows[:, 0].tolist(), bounds.tolist(), longest
    ([[5, 6, 7, 0, 0], [-100, 6, 7, -100, -100], [0, 1, 2, 0, 1]], [0, 3, 5], 3)
    """
    sequences = total = 0
    for pack, width in zip(packs, widths, strict=True):
        sequences += len(pack.samples) + (len(pack.tokens) < width)
        total += width
    if room is not None and sequences > room:
        raise ValueError(
            f"a batch holds {sequences} sequences, but fixed_sequences={room}: raise it, "
            "budget / shortest sample is safe"
        )
    rows = np.empty((3, 1, total), np.int64)
    bounds = np.empty((room or sequences) + 1, np.int32)
    end = sequence = longest = 0
    for pack, width in zip(packs, widths, strict=True):
        tokens, marks = pack.tokens, pack.marks
        start, end = end, end + width
        place = start, end, sequence, longest, pad_token_id
        sequence, longest = _lay(
            tokens,
            tokens if marks is None else marks,
            pack.cu_seqlens,
            pack.first_positions,
            place,
            rows,
            bounds,
        )
    return rows, bounds, longest


@jit
def _lay(tokens, marks, cu_seqlens, first_positions, place, rows, bounds):
    """Lay one pack; gives the number of its last boundary, and the longest sequence so far."""
    start, end, sequence, longest, pad = place
    used = len(tokens)
    bounds[sequence] = start
    ids, labels, positions = rows[0, 0, start:end], rows[1, 0, start:end], rows[2, 0, start:end]
    for t in range(used):  # a loop, since an assignment of slices takes three times as long
        ids[t] = tokens[t]
        labels[t] = marks[t]
    for n in range(len(first_positions)):
        begin, behind = np.int64(cu_seqlens[n]), np.int64(cu_seqlens[n + 1])
        labels[begin] = IGNORE_INDEX
        own, first = positions[begin:behind], first_positions[n]
        for t in range(len(own)):
            own[t] = first + t
        sequence += 1
        bounds[sequence] = start + behind
        longest = max(longest, behind - begin)
    if start + used < end:
        for t in range(used, end - start):
            ids[t], labels[t], positions[t] = pad, IGNORE_INDEX, t - used
        sequence += 1
        bounds[sequence] = end
        longest = max(longest, end - start - used)
    bounds[sequence + 1 :] = end
    return sequence, longest
