"""Lay packs into flat rows: tokens, labels, positions and boundaries, with no Python per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..packing import IGNORE, Pack, Sample


def as_sample(row: Sample | Mapping[str, Any]) -> Sample:
    """Read a trainer's feature dict as a sample."""
    if isinstance(row, Sample):
        return row
    if "input_ids" not in row:
        raise ValueError(f"a row needs `input_ids`, got the keys {sorted(row)}")
    labels: Any = row.get("labels")
    return Sample(np.asarray(row["input_ids"]), labels)


def lay_rows(
    packs: Sequence[Pack], widths: Sequence[int], pad_token_id: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Lay packs end to end, each filled up to its width by one sequence that counts nothing.

    >>> pack = Pack.of([Sample(np.array([5, 6, 7]))], budget=5)
    >>> [array.tolist() for array in lay_rows([pack], [5], pad_token_id=0)]
    [[5, 6, 7, 0, 0], [-100, 6, 7, -100, -100], [0, 1, 2, 0, 1], [0, 3, 5]]
    """
    if len(packs) == 1 and len(packs[0].tokens) == widths[0]:
        pack = packs[0]
        return pack.tokens, pack.labels, pack.positions(), pack.cu_seqlens
    # Three small arrays: one large one would be mapped afresh, page by page, for every batch.
    tokens, labels, positions = (np.empty(sum(widths), np.int64) for _ in range(3))
    bounds, start = [np.zeros(1, np.int32)], 0
    for pack, width in zip(packs, widths, strict=True):
        end, used = start + width, start + len(pack.tokens)
        tokens[start:used], tokens[used:end] = pack.tokens, pad_token_id
        labels[start:used], labels[used:end] = pack.labels, IGNORE
        positions[start:used], positions[used:end] = pack.positions(), np.arange(end - used)
        bounds.append(pack.cu_seqlens[1:] + np.int32(start))
        if used < end:
            bounds.append(np.array([end], np.int32))
        start = end
    return tokens, labels, positions, np.concatenate(bounds)
