"""Which pages hold the keys of which leading tokens: a hash chain, one link every 16 tokens.

    tokens   [ 16 tokens ][ 16 tokens ][ 16 tokens ]…
    keys     h(scope,·) ─▶ h(key0,·) ──▶ h(key1,·)      scope: which weights computed them

A key is only a way to find a candidate: a link counts as a hit when its tokens are equal and it
continues the very link found before it, so a hash collision can cost a hit but never give a wrong
one.
A link lives only as long as the link it continues. Where the page size is no multiple of 16, a
link may lie across the border of two pages and lives as long as both.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

STRIDE = 16


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


@dataclass(slots=True, eq=False)
class Link:
    key: bytes
    tokens: bytes
    pages: tuple[int, ...]
    """Where its tokens lie; the first holds all of its page's tokens before them, too."""
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
        return page in self._in_page

    def pages(self) -> set[int]:
        return set(self._in_page)

    def find(self, tokens: Sequence[int], scope: str) -> tuple[int, list[int]]:
        """Number of leading tokens found, and the pages they lie in."""
        parent, pages, found = None, [], 0
        for key, chunk in self._chunks(tokens, scope):
            link = self._links.get(key)
            if link is None or link.tokens != chunk or link.parent is not parent:
                break
            pages[found // self.page_size :] = link.pages
            found += STRIDE
            parent = link
        return found, pages

    def register(self, tokens: Sequence[int], table: Sequence[int], scope: str) -> None:
        parent = None
        for index, (key, chunk) in enumerate(self._chunks(tokens, scope)):
            link = self._links.get(key)
            if link is None:
                link = self._add(key, chunk, self._across(table, index * STRIDE), parent)
            elif link.tokens != chunk or link.parent is not parent:
                return  # another prefix has this key: it keeps it
            parent = link

    def drop(self, page: int) -> list[int]:
        """Forget the links in a page and all that continue them; return the pages left empty."""
        doomed, emptied = list(self._in_page.get(page, ())), []
        while doomed:
            link = doomed.pop()
            if self._links.get(link.key) is not link:
                continue
            del self._links[link.key]
            if link.parent is not None:
                link.parent.children.remove(link)
            doomed.extend(link.children)
            for held in link.pages:
                links = self._in_page[held]
                links.remove(link)
                if not links:
                    del self._in_page[held]
                    emptied.append(held)
        return emptied

    def _across(self, table: Sequence[int], start: int) -> tuple[int, ...]:
        """The pages of a stride that begins at a token."""
        last = (start + STRIDE - 1) // self.page_size
        return tuple(table[start // self.page_size : last + 1])

    def _add(self, key: bytes, chunk: bytes, pages: tuple[int, ...], parent: Link | None) -> Link:
        link = self._links[key] = Link(key, chunk, pages, parent)
        for page in pages:
            self._in_page.setdefault(page, []).append(link)
        if parent is not None:
            parent.children.add(link)
        return link

    def _chunks(self, tokens: Sequence[int], scope: str):
        data = array("q", tokens).tobytes()
        key = self.digest(scope.encode())
        width = STRIDE * 8
        for start in range(0, len(data) - width + 1, width):
            chunk = data[start : start + width]
            key = self.digest(key + chunk)
            yield key, chunk
