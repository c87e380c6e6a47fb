"""Split, truncate, drop or refuse items that are longer than a pack, or than `max_length`.

budget 4, lengths 3 10 4          split      3 | 4 4 2 | 4
                                  truncate   3 | 4     | 4      6 tokens lost, counted
                                  drop       3 |       | 4     10 tokens lost, counted
                                  error      raised
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..pack import MAX_BUDGET

if TYPE_CHECKING:
    from .planner import Counts

Overflow = Literal["split", "truncate", "drop", "error"]


def cut_items(lengths: np.ndarray, capacity: int, overflow: Overflow, counts: Counts) -> np.ndarray:
    """Turn items, some longer than `capacity`, into segments that fit; update the counts.

    >>> from nopad.packing.planning import Counts
    >>> counts = Counts()
    >>> cut_items(np.array([3, 10, 4]), 4, overflow="split", counts=counts)[2].tolist()
    [3, 4, 4, 2, 4]
    >>> counts.split
    1
    """
    segments, long = whole_items(counts.items, lengths), lengths > capacity
    if overflow == "error":
        first = int(np.argmax(long))
        raise too_long_error(f"item {counts.items + first}", int(lengths[first]), capacity)
    if overflow == "split":
        counts.split += int(long.sum())
        return _split(segments, capacity)
    if overflow == "truncate":
        counts.truncated += int(long.sum())
        counts.truncated_tokens += int((lengths[long] - capacity).sum())
        segments[2] = np.minimum(lengths, capacity)
        return segments
    counts.dropped += int(long.sum())
    counts.dropped_tokens += int(lengths[long].sum())
    return segments[:, ~long]


def too_long_error(location: object, length: int, capacity: int) -> ValueError:
    """Build the error for a sample that is longer than a pack or than `max_length`."""
    return ValueError(
        f"{location} has {length} tokens, at most {capacity} are allowed: choose overflow= "
        "(split, truncate or drop), or raise budget= or max_length=, up to the model's positions; "
        "samples with images can only be dropped, those with a label not be split"
    )


def max_sample_length(packer: Mapping[str, Any]) -> int | None:
    """Return the longest sample that a packer with these settings accepts; None: no limit."""
    return max_segment(packer) if packer["overflow"] == "error" else None


def kept_lengths(lengths: np.ndarray, packer: Mapping[str, Any]) -> np.ndarray:
    """Return the tokens of each item that a packer with these settings keeps.

    >>> from nopad.packing import Planner
    >>> kept_lengths(np.array([3, 10]), Planner(budget=4, overflow="truncate").settings).tolist()
    [3, 4]
    """
    if packer["overflow"] == "truncate":
        return np.minimum(lengths, max_segment(packer))
    if packer["overflow"] == "drop":
        return np.where(lengths > max_segment(packer), 0, lengths)
    return lengths


def pack_capacity(planner: Mapping[str, Any]) -> int:
    """Return the tokens that a pack can hold: the budget, rounded down to `pad_to_multiple_of`."""
    multiple = planner["pad_to_multiple_of"]
    return planner["budget"] // multiple * multiple


def max_segment(planner: Mapping[str, Any]) -> int:
    """Return the longest segment of a planner with these settings."""
    return min(pack_capacity(planner), planner["max_length"] or MAX_BUDGET)


def whole_items(first: int, lengths: np.ndarray) -> np.ndarray:
    """Return items, numbered from `first`, as one segment each."""
    segments = np.zeros((3, len(lengths)), np.int64)
    segments[0], segments[2] = np.arange(first, first + len(lengths)), lengths
    return segments


def _split(segments: np.ndarray, capacity: int) -> np.ndarray:
    """Cut every item into parts of `capacity` tokens and a remainder."""
    parts = -(-segments[2] // capacity)
    items, _, lengths = np.repeat(segments, parts, axis=1)
    starts = (np.arange(len(items)) - np.repeat(np.cumsum(parts) - parts, parts)) * capacity
    return np.array([items, starts, np.minimum(lengths - starts, capacity)])
