"""Debug checks: a step reads the KV slots of its own tokens; pages, rows and counters agree.

Each KV slot has a tag: a hash of token, position and version of the weights. The host follows the
same page tables, slots and copies as the device, so a wrong slot, a stale page, a shifted position
or keys of other weights show as a wrong tag before they become a wrong token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...attention.paging import PageCopy
from ..requests.draws import splitmix64
from .scheduler import Scheduler, sort_key
from .step import Step


class CacheChecker:
    """The tag of every KV slot."""

    def __init__(self, num_pages: int, page_size: int):
        self._page_size = page_size
        self._tags = np.zeros((num_pages, page_size), dtype=np.uint64)

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Follow page copies; all sources are read before any target is written."""
        sources = self._tags[[c.source for c in copies]]
        self._tags[[c.target for c in copies]] = sources

    def check(self, step: Step, cache_salt: str) -> None:
        """Raise if a sequence would read or write anything but its own tokens."""
        assert (step.kv_slots >= 0).all(), "a token has no KV slot"
        assert len(np.unique(step.kv_slots)) == len(step.kv_slots), "two tokens share a KV slot"
        tags = self._tags.reshape(-1)
        tags[step.kv_slots] = _tag(step.positions, step.token_ids, cache_salt)
        for index, request in enumerate(step.requests):
            positions = np.arange(step.seq_lens[index])
            pages = step.page_table[index, positions // self._page_size]
            kv_slots = pages * self._page_size + positions % self._page_size
            tokens = request.token_ids(0, len(positions))
            wrong = tags[kv_slots] != _tag(positions, tokens, cache_salt)
            if wrong.any():
                position = int(wrong.argmax())
                raise AssertionError(
                    f"request {request.id}: KV slot {int(kv_slots[position])} does not hold its "
                    f"token {position}"
                )


def check_scheduler(scheduler: Scheduler) -> None:
    """Assert that pages, rows and counters agree."""
    pages, running = scheduler.pages, scheduler.running
    pages.check()
    rows = sorted(scheduler._free_rows + [r.row for r in running])
    assert rows == list(range(len(scheduler.page_table))), "a row is lost or used twice"
    assert {r.id for r in running} == set(pages.owners), "a page has no request"
    assert running == sorted(running, key=sort_key), "running requests are out of order"
    for r in running:
        own = pages.pages(r.id)
        assert r.num_pages == len(own), f"request {r.id} miscounts its pages"
        assert r.num_computed <= len(own) * pages.page_size, f"request {r.id} lacks pages"
        table = scheduler.page_table[r.row, : len(own)].tolist()
        assert table == own, f"request {r.id}: wrong page table"


def _tag(positions: np.ndarray, tokens: np.ndarray, cache_salt: str) -> np.ndarray:
    key = np.uint64(int.from_bytes(cache_salt.encode()[-8:].rjust(8, b"\0"), "little"))
    words = np.asarray(positions, np.uint64) << np.uint64(32) | np.asarray(tokens, np.uint64)
    return splitmix64(words ^ splitmix64(np.array([key]))) | np.uint64(1)
