"""The prefix index: which pages hold the keys of which leading tokens.

A hash chain with one link every 16 tokens:

    tokens   [ 16 tokens ][ 16 tokens ][ 16 tokens ]…
    keys     h(scope,·) ─▶ h(key0,·) ──▶ h(key1,·)      scope: the weights that computed them

A key only finds a candidate: a link is a hit if its tokens are equal and its parent is the link
found before, so a hash collision can cost a hit but never give a wrong one. A link lives as long as
its parent. If the page size is not a multiple of 16, a link may cross a page boundary; it then
lives as long as both pages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

TokenIds = Sequence[int] | np.ndarray
STRIDE = 16
"""Tokens per link, whatever the page size."""


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


@dataclass(slots=True, eq=False)
class Link:
    """The keys of 16 tokens, after those of the parent."""

    key: bytes
    tokens: bytes
    pages: tuple[int, ...]
    """The pages of its tokens; the first also holds the tokens before them in that page."""
    parent: Link | None
    children: set[Link] = field(default_factory=set)


class PrefixIndex:
    """Find the longest registered prefix of a token sequence."""

    def __init__(self, page_size: int, digest: Callable[[bytes], bytes] = sha256):
        self.page_size = page_size
        self.digest = digest
        self._links: dict[bytes, Link] = {}
        self._in_page: dict[int, list[Link]] = {}

    def holds(self, page: int) -> bool:
        """Return whether a page has links."""
        return page in self._in_page

    def pages(self) -> set[int]:
        """Return the pages that have links."""
        return set(self._in_page)

    def find(self, tokens: TokenIds, scope: str) -> tuple[int, list[int]]:
        """Return the number of leading tokens found, and their pages."""
        parent, pages, num_tokens = None, [], 0
        for key, chunk in self._chunks(tokens, scope):
            link = self._links.get(key)
            if link is None or link.tokens != chunk or link.parent is not parent:
                break
            pages[num_tokens // self.page_size :] = link.pages
            num_tokens += STRIDE
            parent = link
        return num_tokens, pages

    def register(self, tokens: TokenIds, table: Sequence[int], scope: str) -> None:
        """Add the links of these tokens, which are in the pages of `table`."""
        parent = None
        for index, (key, chunk) in enumerate(self._chunks(tokens, scope)):
            link = self._links.get(key)
            if link is None:
                link = self._add(key, chunk, self._pages_of_link(table, index * STRIDE), parent)
            elif link.tokens != chunk or link.parent is not parent:
                return  # a collision: the link that has this key keeps it
            parent = link

    def drop(self, page: int) -> list[int]:
        """Drop the links in a page and their descendants; return the pages left without links."""
        links, emptied = list(self._in_page.get(page, ())), []
        while links:
            link = links.pop()
            if self._links.get(link.key) is not link:
                continue
            del self._links[link.key]
            if link.parent is not None:
                link.parent.children.remove(link)
            links.extend(link.children)
            for link_page in link.pages:
                in_page = self._in_page[link_page]
                in_page.remove(link)
                if not in_page:
                    del self._in_page[link_page]
                    emptied.append(link_page)
        return emptied

    def _pages_of_link(self, table: Sequence[int], start: int) -> tuple[int, ...]:
        """Return the pages of the link whose first token is `start`."""
        last = (start + STRIDE - 1) // self.page_size
        return tuple(table[start // self.page_size : last + 1])

    def _add(self, key: bytes, chunk: bytes, pages: tuple[int, ...], parent: Link | None) -> Link:
        link = self._links[key] = Link(key, chunk, pages, parent)
        for page in pages:
            self._in_page.setdefault(page, []).append(link)
        if parent is not None:
            parent.children.add(link)
        return link

    def _chunks(self, tokens: TokenIds, scope: str) -> Iterator[tuple[bytes, bytes]]:
        """Yield the key and the tokens of each link."""
        data = np.asarray(tokens, dtype=np.int64).tobytes()
        key = self.digest(scope.encode())
        size = STRIDE * 8
        for start in range(0, len(data) - size + 1, size):
            chunk = data[start : start + size]
            key = self.digest(key + chunk)
            yield key, chunk
