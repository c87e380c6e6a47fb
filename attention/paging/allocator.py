"""`PageAllocator`: which request holds which KV-cache page, and cached prefixes, in pure integers.

Every page is in one of three states:

    free ──allocate──▶ held, by one owner or several ──free──▶ free
                          ▲                           └──────▶ cached: no owner, but it still holds
                          └────── attach_prefix ◀────────────  a registered prefix

Once the free list is empty, cached pages are allocated again, least recently used first. Shared
pages are full and never written. If a prefix ends inside a page, `attach_prefix` returns the copy
that must be made, with `PagedCache.copy_pages`, before the next forward writes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from .prefix import STRIDE, PrefixIndex, TokenIds, sha256


class OutOfPages(RuntimeError):
    """No page is free and none can be evicted; the allocator is unchanged by the call."""


@dataclass(frozen=True, slots=True)
class PageCopy:
    """A page whose content must be copied into another before the next forward."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The part of a prompt that was found in the cache."""

    tokens: int
    """Number of leading tokens whose keys and values are in the owner's pages now."""
    copy: PageCopy | None = None
    """Set if the hit ends inside a page."""


class PageAllocator:
    """Allocate pages to owners, share them between owners, and cache prefixes for later ones.

    >>> pages = PageAllocator(num_pages=4, page_size=16)
    >>> pages.allocate("a", 2)
    [0, 1]
    >>> pages.register("a", range(32), scope="weights 0")
    >>> pages.free("a")
    >>> pages.attach_prefix("b", range(40), scope="weights 0"), pages.pages("b"), pages.available
    (PrefixHit(tokens=32, copy=None), [0, 1], 2)
    >>> pages.attach_prefix("c", range(40), scope="weights 1").tokens
    0
    """

    def __init__(
        self, num_pages: int, page_size: int, *, digest: Callable[[bytes], bytes] = sha256
    ):
        if num_pages < 1 or page_size < 1 or page_size % STRIDE:
            raise ValueError(
                f"got {num_pages} pages of {page_size} tokens: use at least one page, and a page "
                f"size that is a multiple of {STRIDE}"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._tables: dict[Hashable, list[int]] = {}
        self._references = [0] * num_pages
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._prefixes = PrefixIndex(page_size, digest)

    @property
    def available(self) -> int:
        """Number of pages that can be allocated now."""
        return len(self._free) + len(self._cached)

    @property
    def owners(self) -> list[Hashable]:
        return list(self._tables)

    def pages(self, owner: Hashable) -> list[int]:
        """Return the owner's pages in order, as a copy."""
        return list(self._table(owner))

    def allocate(self, owner: Hashable, count: int) -> list[int]:
        """Append pages to the owner's, creating the owner if it is new; return them."""
        if count < 0:
            raise ValueError(f"owner {owner!r} requested {count} pages")
        if count > self.available:
            raise OutOfPages(
                f"owner {owner!r} needs {count} pages, "
                f"{self.available} of {self.num_pages} are left"
            )
        pages = [self._take() for _ in range(count)]
        self._tables.setdefault(owner, []).extend(pages)
        return pages

    def free(self, owner: Hashable) -> None:
        """Free all pages of an owner, and remove the owner."""
        self._release(self._table(owner))
        del self._tables[owner]

    def register(self, owner: Hashable, tokens: TokenIds, scope: str) -> None:
        """Register the owner's pages, which hold these leading tokens, for later owners.

        Several owners may register the same prefix; the pages of the first are used.
        """
        table = self._table(owner)
        if len(tokens) > len(table) * self.page_size:
            raise ValueError(f"owner {owner!r}: {len(tokens)} tokens do not fit pages {table}")
        self._prefixes.register(tokens, table, scope)

    def attach_prefix(self, owner: Hashable, tokens: TokenIds, scope: str) -> PrefixHit:
        """Create an owner with the longest registered prefix of its tokens.

        Full pages are shared. If the hit ends inside a page, that page must be copied; if no page
        is left for the copy, the hit ends at the page before.
        """
        if owner in self._tables:
            raise ValueError(f"owner {owner!r} exists and holds pages {self._tables[owner]}")
        num_tokens, pages = self._prefixes.find(tokens, scope)
        full_pages = num_tokens // self.page_size
        for page in pages:
            self._hold(page)
        table = self._tables[owner] = pages[:full_pages]
        if full_pages == len(pages):
            return PrefixHit(num_tokens)
        copy = self._copy_and_release(pages[full_pages])
        if copy is None:
            return PrefixHit(full_pages * self.page_size)
        table.append(copy.target)
        return PrefixHit(num_tokens, copy)

    def clear_prefixes(self) -> None:
        """Drop every registered prefix; held pages stay held."""
        self._prefixes = PrefixIndex(self.page_size, self._prefixes.digest)
        self._free.extend(self._cached)
        self._cached.clear()

    def check(self) -> None:
        """Assert that free, cached and held pages add up, and that reference counts are right."""
        counts = [0] * self.num_pages
        for table in self._tables.values():
            for page in table:
                counts[page] += 1
        assert counts == self._references, "a reference count is wrong"
        unheld = set(self._free)
        assert len(unheld) == len(self._free) and unheld.isdisjoint(self._cached), (
            "a page is free or cached twice"
        )
        unheld.update(self._cached)
        assert not any(counts[page] for page in unheld), "a free or cached page is held"
        assert len(unheld) + sum(map(bool, counts)) == self.num_pages, "a page leaked"
        registered = self._prefixes.pages()
        assert self._cached.keys() <= registered, "a cached page holds no prefix"
        assert registered.isdisjoint(self._free), "a free page is still registered"

    def _table(self, owner: Hashable) -> list[int]:
        table = self._tables.get(owner)
        if table is None:
            raise ValueError(f"owner {owner!r} holds no page: never allocated, or already freed")
        return table

    def _take(self) -> int:
        if not self._free:
            self._evict(next(iter(self._cached)))
        page = self._free.pop()
        self._references[page] = 1
        return page

    def _hold(self, page: int) -> None:
        self._references[page] += 1
        self._cached.pop(page, None)

    def _release(self, pages: Sequence[int]) -> None:
        for page in reversed(pages):  # the tail of a prefix becomes the first to be evicted
            self._references[page] -= 1
            if self._references[page] == 0:
                if self._prefixes.holds(page):
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def _copy_and_release(self, source: int) -> PageCopy | None:
        """Allocate a copy of a page that is held, and release the page; None if no page is left."""
        target = self._take() if self.available else None
        self._release([source])
        return None if target is None else PageCopy(source, target)

    def _evict(self, page: int) -> None:
        """Drop the prefixes in a page, and those that continue them in other pages."""
        for emptied in self._prefixes.drop(page):
            if emptied in self._cached:
                del self._cached[emptied]
                self._free.append(emptied)
