"""Items longer than a pack or than `max_length`: split, truncate or drop them, or raise.

budget 4, lengths 3 10 4          split      3 | 4 4 2 | 4
                                  truncate   3 | 4     | 4      6 tokens lost, counted
                                  drop       3 |       | 4     10 tokens lost, counted
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from .segments import Segments

Overflow = Literal["split", "truncate", "drop", "error"]


@dataclass(slots=True)
class Counts:
    """Counters of a planner; tokens = packed + pending + truncated + dropped."""

    items: int = 0
    tokens: int = 0
    split: int = 0
    """Items split because they are too long."""
    truncated: int = 0
    """Items truncated."""
    truncated_tokens: int = 0
    dropped: int = 0
    """Items dropped."""
    dropped_tokens: int = 0
    packs: int = 0
    packed_tokens: int = 0
    sequences: int = 0
    """Samples and parts of split samples in the packs."""

    def as_list(self) -> list[int]:
        """Return the counters in their order: `Counts(*counts.as_list())` has the same."""
        return [getattr(self, name) for name in self.__slots__]

    @property
    def pending_tokens(self) -> int:
        """Tokens of segments that have no pack yet."""
        return self.tokens - self.packed_tokens - self.truncated_tokens - self.dropped_tokens


def cut_items(lengths: np.ndarray, capacity: int, overflow: Overflow, counts: Counts) -> Segments:
    """Turn items, some longer than `capacity`, into segments that fit; update the counts.

    >>> counts = Counts()
    >>> cut_items(np.array([3, 10, 4]), 4, overflow="split", counts=counts).lengths.tolist()
    [3, 4, 4, 2, 4]
    >>> counts.split
    1
    """
    items = np.arange(counts.items, counts.items + len(lengths), dtype=np.int64)
    long = lengths > capacity
    if overflow == "error":
        first = int(np.argmax(long))
        raise too_long_error(f"item {items[first]}", int(lengths[first]), capacity)
    if overflow == "split":
        counts.split += int(long.sum())
        return _split(items, lengths, capacity)
    if overflow == "truncate":
        counts.truncated += int(long.sum())
        counts.truncated_tokens += int((lengths[long] - capacity).sum())
        return Segments(items, np.zeros_like(items), np.minimum(lengths, capacity))
    counts.dropped += int(long.sum())
    counts.dropped_tokens += int(lengths[long].sum())
    return Segments(items[~long], np.zeros_like(items[~long]), lengths[~long])


def too_long_error(location: object, length: int, capacity: int) -> ValueError:
    """Build the error for a sample that is longer than a pack or than `max_length`."""
    return ValueError(
        f"{location} has {length} tokens, at most {capacity} are allowed: choose overflow= "
        "(split, truncate or drop), or raise budget= or max_length=, up to the model's positions"
    )


def max_sample_length(packer: Mapping[str, Any]) -> int | None:
    """Return the longest sample that a packer with these settings accepts; None: no limit."""
    return _max_segment(packer) if packer["overflow"] == "error" else None


def kept_lengths(lengths: np.ndarray, packer: Mapping[str, Any]) -> np.ndarray:
    """Return the tokens of each item that a packer with these settings keeps.

    >>> kept_lengths(np.array([3, 10]), {"budget": 4, "overflow": "truncate"}).tolist()
    [3, 4]
    """
    if packer.get("overflow") == "truncate":
        return np.minimum(lengths, _max_segment(packer))
    if packer.get("overflow") == "drop":
        return np.where(lengths > _max_segment(packer), 0, lengths)
    return lengths


def _max_segment(packer: Mapping[str, Any]) -> int:
    multiple = packer.get("pad_to_multiple_of", 1)
    capacity = packer["budget"] // multiple * multiple
    return min(capacity, packer.get("max_length") or capacity)


def _split(items: np.ndarray, lengths: np.ndarray, capacity: int) -> Segments:
    """Cut every item into parts of `capacity` tokens and a remainder."""
    parts = -(-lengths // capacity)
    firsts = np.repeat(np.cumsum(parts) - parts, parts)
    starts = (np.arange(len(firsts)) - firsts) * capacity
    remaining = np.repeat(lengths, parts) - starts
    return Segments(np.repeat(items, parts), starts, np.minimum(remaining, capacity))
