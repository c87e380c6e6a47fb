"""Seeded faults of the allocator and the prefix index: play against the model catches each."""

import pytest
from allocator_world import play
from nopad.attention.paging import PageAllocator, PageCopy
from nopad.attention.paging.allocator import PrefixHit
from nopad.attention.paging.prefix import PrefixIndex, sha256

allocate, free, attach = PageAllocator.allocate, PageAllocator.free, PageAllocator.attach_prefix
find, register = PrefixIndex.find, PrefixIndex.register


def copy_into_the_shared_page(self, *args):
    hit = attach(self, *args)
    copy = hit.copy and PageCopy(hit.copy.source, hit.copy.source)
    return PrefixHit(hit.tokens, copy)


def attach_without_holding(self, owner, *args):
    hit = attach(self, owner, *args)
    free(self, owner)
    allocate(self, owner, 0)
    return hit


def free_two(self, owner):
    free(self, owner)
    for other in self.owners[-1:]:
        free(self, other)


FAULTS = {
    "a shared page is written": (PageAllocator, "attach_prefix", copy_into_the_shared_page),
    "a hit is not held": (PageAllocator, "attach_prefix", attach_without_holding),
    "a freed page keeps its count": (PageAllocator, "free", lambda self, owner: None),
    "an owner too many is freed": (PageAllocator, "free", free_two),
    "a free page stays registered": (PrefixIndex, "drop", lambda self, page: [page]),
    "a page without a prefix is cached": (PrefixIndex, "holds", lambda self, page: True),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_seeded_fault_is_caught(fault, monkeypatch):
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises((AssertionError, ValueError, KeyError, IndexError)):
        play(4_000, seed=1)


def trust_digests(monkeypatch):
    """Let a prefix be found by the tokens of any other with the same digest."""
    known = {}

    def keys(index, tokens):
        counts = range(16, len(tokens) + 1, 16)
        return {(count, index.digest(bytes(tokens[:count]))): tokens[:count] for count in counts}

    def trusting_register(self, tokens, table, scope):
        known.update(keys(self, tokens))
        register(self, tokens, table, scope)

    def trusting_find(self, tokens, scope):
        alike = [known[key] for key in keys(self, tokens) if key in known]
        return max((find(self, each, scope) for each in [tokens, *alike]), key=lambda hit: hit[0])

    monkeypatch.setattr(PrefixIndex, "register", trusting_register)
    monkeypatch.setattr(PrefixIndex, "find", trusting_find)


def forget_the_scope(monkeypatch):
    monkeypatch.setattr(PrefixIndex, "find", lambda self, tokens, scope: find(self, tokens, ""))
    monkeypatch.setattr(
        PrefixIndex,
        "register",
        lambda self, tokens, table, _: register(self, tokens, table, ""),
    )


@pytest.mark.parametrize("fault", ["tokens are not compared", "the scope is not hashed"])
def test_seeded_faults_of_the_prefix_index_are_caught(fault, monkeypatch):
    digest = sha256
    if fault == "the scope is not hashed":
        forget_the_scope(monkeypatch)
    else:
        trust_digests(monkeypatch)
        digest = lambda data: bytes([sum(data) % 251])  # noqa: E731
    with pytest.raises(AssertionError):
        play(4_000, seed=1, digest=digest, page_size=16)
