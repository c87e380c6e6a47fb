"""A debug switch: a tag for every slot of the cache, checked before every step.

A tag names what a slot should hold: token, position and version of the weights. The host follows
the same tables, slots and copies as the device, so a wrong slot, a stale page, a shifted position
or keys of other weights show as a wrong tag before they can become a wrong token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...attention.paging import PageCopy
from ..requests.rng import splitmix64
from .step import Step


class CacheChecker:
    """What each slot of the cache should hold."""

    def __init__(self, num_pages: int, page_size: int):
        self._size = page_size
        self._tags = np.zeros((num_pages, page_size), dtype=np.uint64)

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Follow page copies, all reads before any write."""
        sources = self._tags[[c.source for c in copies]]
        self._tags[[c.target for c in copies]] = sources

    def check(self, step: Step, scope: str) -> None:
        """Raise if a sequence would read or write anything but its own tokens."""
        assert (step.slots >= 0).all(), "a token has no slot"
        assert len(np.unique(step.slots)) == len(step.slots), "two tokens share a slot"
        tags = self._tags.reshape(-1)
        tags[step.slots] = _tag(step.positions, step.ids, scope)
        for row, request in enumerate(step.requests):
            length = int(step.lengths[row])
            place = np.arange(length)
            slots = step.table[row, place // self._size] * self._size + place % self._size
            wrong = tags[slots] != _tag(place, request.tokens(0, length), scope)
            if wrong.any():
                at = int(wrong.argmax())
                raise AssertionError(
                    f"request {request.id}: slot {int(slots[at])} does not hold its token {at}"
                )


def _tag(positions: np.ndarray, tokens: np.ndarray, scope: str) -> np.ndarray:
    key = np.uint64(int.from_bytes(scope.encode()[-8:].rjust(8, b"\0"), "little"))
    words = np.asarray(positions, np.uint64) << np.uint64(32) | np.asarray(tokens, np.uint64)
    return splitmix64(words ^ splitmix64(np.array([key]))) | np.uint64(1)
