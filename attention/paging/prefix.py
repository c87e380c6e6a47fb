"""`PrefixIndex`: which pages hold the keys and values of which leading tokens, as a hash chain.

A hash chain with one link every 16 tokens:

    tokens   [ 16 tokens ][ 16 tokens ][ 16 tokens ]…
    keys     h(scope,·) ─▶ h(key0,·) ──▶ h(key1,·)      scope: the weights that computed them

A key only finds a candidate: a link is a hit if its stored content (position, parent, tokens) is
equal, and its parent is the link found before. So a hash collision can cost a hit but never give a
wrong one. A link lives as long as its parent. Page sizes are multiples of 16, so a link is in one
page.

Links are bytes in dicts, not objects that refer to each other: Python's garbage collector would
visit hundreds of thousands of such objects again and again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

TokenIds = Sequence[int] | np.ndarray
STRIDE = 16
"""Tokens per link, whatever the page size."""
_POSITION_BYTES = 8
_TOKENS_BYTES = STRIDE * 8


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


class PrefixIndex:
    """Find the longest registered prefix of a token sequence."""

    def __init__(self, page_size: int, digest: Callable[[bytes], bytes] = sha256):
        self.page_size = page_size
        self.digest = digest
        self._links: dict[bytes, bytes] = {}
        """By key, what it was computed from: position, key of the parent, tokens."""
        self._page: dict[bytes, int] = {}
        """The page of each link; it also holds the tokens before the link in that page."""
        self._in_page: dict[int, list[bytes]] = {}
        """Links by page. A page holds one sequence: each is an ancestor of those after it."""
        self._children: dict[bytes, set[bytes]] = {}
        """Children that are not in the page of their parent."""

    def holds(self, page: int) -> bool:
        """Return whether a page has links."""
        return page in self._in_page

    def pages(self) -> set[int]:
        """Return the pages that have links."""
        return set(self._in_page)

    def find(self, tokens: TokenIds, scope: str) -> tuple[int, list[int]]:
        """Return the number of leading tokens found, and their pages."""
        pages, num_tokens = [], 0
        for key, link in self._chain(tokens, scope):
            if self._links.get(key) != link:
                break
            pages[num_tokens // self.page_size :] = [self._page[key]]
            num_tokens += STRIDE
        return num_tokens, pages

    def register(self, tokens: TokenIds, table: Sequence[int], scope: str) -> None:
        """Add the links of these tokens, which are in the pages of `table`."""
        for index, (key, link) in enumerate(self._chain(tokens, scope)):
            registered = self._links.get(key)
            if registered is None:
                self._add(key, link, table[index * STRIDE // self.page_size])
            elif registered != link:
                return  # a collision: the link that has this key keeps it

    def drop(self, page: int) -> list[int]:
        """Drop the links in a page and their descendants; return the pages left without links."""
        keys, emptied = list(self._in_page.get(page, ())), []
        while keys:
            key = keys.pop()
            link = self._links.pop(key, None)
            if link is None:
                continue
            keys.extend(self._children.pop(key, ()))
            if (siblings := self._children.get(_parent(link))) is not None:
                siblings.discard(key)
            link_page = self._page.pop(key)
            in_page = self._in_page[link_page]
            keys.extend(in_page[in_page.index(key) + 1 :])
            in_page.remove(key)
            if not in_page:
                del self._in_page[link_page]
                emptied.append(link_page)
        return emptied

    def _add(self, key: bytes, link: bytes, page: int) -> None:
        self._links[key], self._page[key] = link, page
        self._in_page.setdefault(page, []).append(key)
        parent = _parent(link)
        if parent in self._links and self._page[parent] != page:
            self._children.setdefault(parent, set()).add(key)

    def _chain(self, tokens: TokenIds, scope: str) -> Iterator[tuple[bytes, bytes]]:
        """Yield each link with its key.

        Its position makes every link of a chain distinct, even if keys collide.
        """
        data = np.asarray(tokens, dtype=np.int64).tobytes()
        key = scope.encode()
        for start in range(0, len(data) - _TOKENS_BYTES + 1, _TOKENS_BYTES):
            position = start.to_bytes(_POSITION_BYTES, "big")
            link = position + key + data[start : start + _TOKENS_BYTES]
            key = self.digest(link)
            yield key, link


def _parent(link: bytes) -> bytes:
    """Return the key of a link's parent; for the first link its scope."""
    return link[_POSITION_BYTES:-_TOKENS_BYTES]
