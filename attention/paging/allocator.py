"""Who holds which page of the cache: pure integers, no tensors.

Every page is in one of three states:

    free ──allocate──▶ held, by one owner or several ──free──▶ free
                          ▲                           └──────▶ cached: nobody holds it, but a
                          └────────── adopt ◀────────────────  registered prefix still lives in it

Cached pages are handed out again, least recently used first, once the free list is empty. Shared
pages are never written: `make_private` says which copy must be made first. Copies that `make_private` and `attach_prefix` ask
for must all be made, in one `PagedCache.copy_page`, before the next forward writes.

The engine shares by `attach_prefix` alone: completions of one prompt find its prefix, and nobody forks.
`fork` and `make_private` serve searches that branch in the middle of a page, such as beams.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from .prefix import PrefixIndex, sha256


class OutOfPages(RuntimeError):
    """Nothing is free and nothing can be evicted; the allocator is as it was before the call."""


@dataclass(frozen=True, slots=True)
class PageCopy:
    """A page whose content must be copied into another before the next forward."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """How much of a prompt was found in the cache."""

    tokens: int
    """Leading tokens whose keys and values the owner's pages now hold."""
    copy: PageCopy | None = None
    """Set where the hit ends inside a page."""


class PageAllocator:
    """Hand out pages to owners, share them between owners, and keep prefixes for later ones.

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
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"need at least one page of one token, got {num_pages} x {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._tables: dict[Hashable, list[int]] = {}
        self._references = [0] * num_pages
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._prefixes = PrefixIndex(page_size, digest)

    @property
    def available(self) -> int:
        """Pages that could be allocated now."""
        return len(self._free) + len(self._cached)

    @property
    def owners(self) -> list[Hashable]:
        return list(self._tables)

    def pages(self, owner: Hashable) -> list[int]:
        """The owner's pages, in order; a copy."""
        return list(self._table(owner))

    def allocate(self, owner: Hashable, count: int) -> list[int]:
        """Append fresh pages to the owner's, creating the owner if need be."""
        if count < 0:
            raise ValueError(f"owner {owner!r} asked for {count} pages")
        if count > self.available:
            raise OutOfPages(
                f"owner {owner!r} needs {count} pages, "
                f"{self.available} of {self.num_pages} are left"
            )
        fresh = [self._take() for _ in range(count)]
        self._tables.setdefault(owner, []).extend(fresh)
        return fresh

    def free(self, owner: Hashable, pages: Sequence[int] | None = None) -> None:
        """Give back the owner's last pages, or all of them and the owner's name with them."""
        table = self._table(owner)
        if pages is None:
            self._release(table)
            del self._tables[owner]
            return
        for page in pages:
            if page not in table:
                raise ValueError(f"page {page} is not of {owner!r}: {self._holders(page)}")
        kept = len(table) - len(pages)
        if sorted(table[kept:]) != sorted(pages):
            raise ValueError(f"pages {list(pages)} are not the last of {owner!r}: {table}")
        self._release(table[kept:])
        del table[kept:]

    def fork(self, parent: Hashable, child: Hashable) -> list[int]:
        """Let a new owner share every page of another."""
        table = list(self._table(parent))
        if child in self._tables:
            raise ValueError(f"owner {child!r} exists and holds pages {self._tables[child]}")
        for page in table:
            self._references[page] += 1
        self._tables[child] = table
        return list(table)

    def make_private(self, owner: Hashable, index: int) -> PageCopy | None:
        """Make the owner's page number `index` its own before it writes there."""
        table = self._table(owner)
        if not 0 <= index < len(table):
            raise ValueError(f"owner {owner!r} has no page number {index}: it holds {table}")
        page = table[index]
        if self._references[page] == 1:
            return None
        if not self.available:
            raise OutOfPages(f"owner {owner!r} cannot copy shared page {page}: no page is left")
        fresh = self._take()
        self._references[page] -= 1
        table[index] = fresh
        return PageCopy(page, fresh)

    def register(self, owner: Hashable, tokens: Sequence[int], scope: str) -> None:
        """Offer the owner's pages, which hold these leading tokens, to later owners.

        Several owners may register the same prefix; the first one's pages serve.
        """
        table = self._table(owner)
        if len(tokens) > len(table) * self.page_size:
            raise ValueError(f"owner {owner!r}: {len(tokens)} tokens do not fit pages {table}")
        self._prefixes.register(tokens, table, scope)

    def attach_prefix(self, owner: Hashable, tokens: Sequence[int], scope: str) -> PrefixHit:
        """Start an owner with the longest registered prefix of its tokens.

        Whole pages are shared. A hit that ends inside a page asks for a copy of that page; where no
        page is left for it, the hit ends at the page before.
        """
        if owner in self._tables:
            raise ValueError(f"owner {owner!r} exists and holds pages {self._tables[owner]}")
        found, pages = self._prefixes.find(tokens, scope)
        whole = found // self.page_size
        for page in pages:
            self._hold(page)
        table = self._tables[owner] = pages[:whole]
        if whole == len(pages):
            return PrefixHit(found)
        copy = self._copy_of(pages[whole])
        if copy is None:
            return PrefixHit(whole * self.page_size)
        table.append(copy.target)
        return PrefixHit(found, copy)

    def clear_prefixes(self) -> None:
        """Drop every registered prefix; held pages stay held."""
        self._prefixes = PrefixIndex(self.page_size, self._prefixes.digest)
        self._free.extend(self._cached)
        self._cached.clear()

    def check(self) -> None:
        """Assert that free, cached and held pages are all pages, and every count is true."""
        counts = [0] * self.num_pages
        for table in self._tables.values():
            for page in table:
                counts[page] += 1
        assert counts == self._references, "a reference count is wrong"
        idle = set(self._free)
        assert len(idle) == len(self._free) and idle.isdisjoint(self._cached), (
            "a page is idle twice"
        )
        idle.update(self._cached)
        assert not any(counts[page] for page in idle), "an idle page is held"
        assert len(idle) + sum(map(bool, counts)) == self.num_pages, "a page leaked"
        registered = self._prefixes.pages()
        assert self._cached.keys() <= registered, "a cached page holds no prefix"
        assert registered.isdisjoint(self._free), "a free page is still registered"

    def _table(self, owner: Hashable) -> list[int]:
        table = self._tables.get(owner)
        if table is None:
            raise ValueError(f"owner {owner!r} holds no page: never allocated, or already freed")
        return table

    def _holders(self, page: int) -> str:
        holders = [owner for owner, table in self._tables.items() if page in table]
        return f"held by {holders}" if holders else "it is free"

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

    def _copy_of(self, source: int) -> PageCopy | None:
        """Copy a page that is held for the moment, and let go of it."""
        target = self._take() if self.available else None
        self._release([source])
        return None if target is None else PageCopy(source, target)

    def _evict(self, page: int) -> None:
        """Drop the prefixes in a page, and those that continue them elsewhere."""
        for emptied in self._prefixes.drop(page):
            if emptied in self._cached:
                del self._cached[emptied]
                self._free.append(emptied)
