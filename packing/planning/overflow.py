"""What becomes of items that are longer than a pack: split, truncated, dropped, or an error.

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
    """What a planner has seen and done; tokens = packed + held back + truncated + dropped."""

    items: int = 0
    tokens: int = 0
    split: int = 0
    """Items that were split because they are longer than a pack."""
    truncated: int = 0
    """Items that were truncated."""
    truncated_tokens: int = 0
    dropped: int = 0
    """Items that were dropped."""
    dropped_tokens: int = 0
    packs: int = 0
    packed_tokens: int = 0

    @property
    def held_tokens(self) -> int:
        """Tokens of segments that wait for their pack."""
        return self.tokens - self.packed_tokens - self.truncated_tokens - self.dropped_tokens


def cut(lengths: np.ndarray, room: int, overflow: Overflow, counts: Counts) -> Segments:
    """Turn items, some longer than `room`, into segments that are not; count what is done.

    >>> counts = Counts()
    >>> cut(np.array([3, 10, 4]), room=4, overflow="split", counts=counts).lengths.tolist()
    [3, 4, 4, 2, 4]
    >>> counts.split
    1
    """
    items = np.arange(counts.items, counts.items + len(lengths), dtype=np.int64)
    long = lengths > room
    if overflow == "error":
        worst = int(np.argmax(long))
        raise too_long(f"item {items[worst]}", int(lengths[worst]), room)
    if overflow == "split":
        counts.split += int(long.sum())
        return _parts(items, lengths, room)
    if overflow == "truncate":
        counts.truncated += int(long.sum())
        counts.truncated_tokens += int((lengths[long] - room).sum())
        return Segments(items, np.zeros_like(items), np.minimum(lengths, room))
    counts.dropped += int(long.sum())
    counts.dropped_tokens += int(lengths[long].sum())
    return Segments(items[~long], np.zeros_like(items[~long]), lengths[~long])


def too_long(where: object, length: int, room: int) -> ValueError:
    """Say that what stands there is longer than a pack."""
    return ValueError(
        f"{where} has {length} tokens, a pack holds {room}: raise the budget, "
        "or choose overflow= (split, truncate or drop)"
    )


def limit(packer: Mapping[str, Any]) -> int | None:
    """Give the tokens that a sample may have under a packer's settings; None: any number."""
    if packer["overflow"] != "error":
        return None
    return packer["budget"] // packer["align"] * packer["align"]


def _parts(items: np.ndarray, lengths: np.ndarray, room: int) -> Segments:
    """Cut every item into parts of `room` tokens and a rest."""
    parts = -(-lengths // room)
    firsts = np.repeat(np.cumsum(parts) - parts, parts)
    starts = (np.arange(len(firsts)) - firsts) * room
    rests = np.repeat(lengths, parts) - starts
    return Segments(np.repeat(items, parts), starts, np.minimum(rests, room))
