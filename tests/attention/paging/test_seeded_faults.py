"""Seeded faults of the allocator and the prefix index: play against the model catches each."""

import pytest
from allocator_world import World, play
from nopad.attention.paging import PageAllocator, PageCopy
from nopad.attention.paging.prefix import PrefixIndex, sha256


def broken(name):
    """An allocator with one seeded fault."""
    faults = {
        "a shared page is written": (
            "_copy_and_release",
            lambda self, source: PageCopy(source, source),
        ),
        "a freed page keeps its count": ("_release", lambda self, pages: None),
        "a hit is not held": ("_hold", lambda self, page: None),
        "a free page stays registered": ("_evict", _careless_evict),
        "a cached page is handed out and kept": ("_take", _careless_take),
        "freed twice": ("_release", _double_release),
    }
    method, fault = faults[name]
    return type("Broken", (PageAllocator,), {method: fault})


def _careless_evict(self, page):
    del self._cached[page]
    self._free.append(page)


def _careless_take(self):
    page = self._free[-1] if self._free else next(iter(self._cached))
    self._references[page] = 1
    return page


def _double_release(self, pages):
    for page in pages:
        self._references[page] -= 1
        self._free.append(page)


@pytest.mark.parametrize(
    "fault",
    [
        "a shared page is written",
        "a freed page keeps its count",
        "a hit is not held",
        "a free page stays registered",
        "a cached page is handed out and kept",
        "freed twice",
    ],
)
def test_every_seeded_fault_is_caught(fault, monkeypatch):
    monkeypatch.setitem(World.__init__.__globals__, "PageAllocator", broken(fault))
    with pytest.raises((AssertionError, ValueError, KeyError, IndexError, StopIteration)):
        play(4_000, seed=1)


@pytest.mark.parametrize("fault", ["tokens are not compared", "the scope is not hashed"])
def test_seeded_faults_of_the_prefix_index_are_caught(fault, monkeypatch):
    if fault == "the scope is not hashed":
        original = PrefixIndex._chain
        monkeypatch.setattr(PrefixIndex, "_chain", lambda self, t, scope: original(self, t, ""))
        digest = sha256
    else:
        monkeypatch.setattr(PrefixIndex, "find", _trusting_find)
        digest = lambda data: bytes([sum(data) % 251])  # noqa: E731
    with pytest.raises(AssertionError):
        play(4_000, seed=1, digest=digest, page_size=16)


def _trusting_find(self, tokens, scope):
    """Take every key's word for it."""
    pages = []
    for key, _ in self._chain(tokens, scope):
        if key not in self._links:
            break
        pages.append(self._page[key])
    return 16 * len(pages), pages
