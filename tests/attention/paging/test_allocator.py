"""The allocator against a model of it: a dict of what every page must hold.

The model plays the cache: it remembers, per page and slot, which token was written there, and with
which weights. Whatever the allocator decides, an owner must always read back its own text.
"""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from nopad.attention.paging import PageAllocator
from nopad.attention.paging.allocator import OutOfPages
from nopad.attention.paging.prefix import PrefixIndex, sha256

SCOPES = ("weights 0", "weights 1")


class World:
    """An allocator, a fake cache and the text each owner believes to have written."""

    def __init__(self, num_pages=24, page_size=32, **named):
        self.pages = PageAllocator(num_pages, page_size, **named)
        self.size = page_size
        self.cache = {}  # (page, slot) -> (token, scope) of the last write
        self.text = {}  # owner -> list of tokens
        self.scope = {}  # owner -> the weights that computed its keys
        self.next = 0

    def start(self, tokens, scope):
        owner = self.next
        self.next += 1
        hit = self.pages.attach_prefix(owner, tokens, scope)
        if hit.copy is not None:
            assert hit.tokens % self.size, "a copy is only needed inside a page"
            self._copy(hit.copy)
        assert hit.tokens <= len(tokens) and (hit.tokens % 16 == 0 or hit.tokens % self.size == 0)
        self.text[owner], self.scope[owner] = list(tokens[: hit.tokens]), scope
        self.read(owner)  # whatever was found must be this very text, by these very weights
        self.write(owner, tokens[hit.tokens :])
        return owner, hit

    def write(self, owner, tokens):
        """Append tokens as a forward does: allocate, copy what is shared, write. False: no room."""
        text = self.text[owner]
        held = len(self.pages.pages(owner))
        try:
            if held * self.size > len(text):
                copy = self.pages.make_private(owner, len(text) // self.size)
                if copy is not None:
                    self._copy(copy)
            need = -(-(len(text) + len(tokens)) // self.size) - held
            self.pages.allocate(owner, max(0, need))
        except OutOfPages:
            return False
        table = self.pages.pages(owner)
        for token in tokens:
            page, slot = table[len(text) // self.size], len(text) % self.size
            holders = [o for o in self.text if page in self.pages.pages(o)]
            assert holders == [owner], f"page {page} is shared by {holders} and was written"
            self.cache[page, slot] = (token, self.scope[owner])
            text.append(token)
        return True

    def read(self, owner):
        table = self.pages.pages(owner)
        for place, token in enumerate(self.text[owner]):
            found = self.cache[table[place // self.size], place % self.size]
            assert found == (token, self.scope[owner]), "an owner read what it had not written"

    def fork(self, owner):
        child = self.next
        self.next += 1
        self.pages.fork(owner, child)
        self.text[child], self.scope[child] = list(self.text[owner]), self.scope[owner]
        return child

    def end(self, owner, register):
        if register:
            self.pages.register(owner, self.text[owner], self.scope[owner])
        self.pages.free(owner)
        del self.text[owner], self.scope[owner]

    def _copy(self, copy):
        for slot in range(self.size):
            self.cache.pop((copy.target, slot), None)
            if (copy.source, slot) in self.cache:
                self.cache[copy.target, slot] = self.cache[copy.source, slot]


def prompt(draw):
    """Prompts that share prefixes: a few stems, cut and continued."""
    stem = [draw.randrange(2)] * draw.choice((0, 16, 20, 48))
    return stem + [draw.randrange(3) for _ in range(draw.choice((0, 1, 16, 17, 40)))]


def play(steps, seed, check_every=1, **named):
    draw, world = random.Random(seed), World(**named)
    hits = copies = refused = 0
    for step in range(steps):
        owners = list(world.text)
        roll = draw.random()
        if roll < 0.3 or not owners:
            owner, hit = world.start(prompt(draw), draw.choice(SCOPES))
            hits, copies = hits + (hit.tokens > 0), copies + (hit.copy is not None)
        elif roll < 0.6:
            owner = draw.choice(owners)
            refused += not world.write(
                owner, [draw.randrange(3) for _ in range(draw.choice((1, 7, 33)))]
            )
        elif roll < 0.65 and len(owners) < 8:
            world.fork(draw.choice(owners))
        elif roll < 0.7:
            owner = draw.choice(owners)
            world.pages.register(owner, world.text[owner], world.scope[owner])
        elif roll < 0.97:
            world.end(draw.choice(owners), register=draw.random() < 0.7)
        elif roll < 0.98:
            world.pages.clear_prefixes()
        if step % check_every == 0:
            world.pages.check()
        if step % 64 == 0:
            for owner in world.text:
                world.read(owner)
    for owner in list(world.text):
        world.end(owner, register=False)
    world.pages.check()
    assert world.pages.available == world.pages.num_pages, "pages leaked"
    return hits, copies, refused


@pytest.mark.parametrize("page_size", [16, 24, 32, 40, 64])
def test_no_page_leaks_and_every_owner_reads_its_own_text(page_size):
    hits, copies, refused = play(8_000, seed=page_size, page_size=page_size)
    assert hits > 50 and refused > 50 and (copies > 20 or page_size == 16)


def churn(steps, seed):
    """Bare operations, without the model, so that a million of them fit a minute."""
    draw, pages = random.Random(seed), PageAllocator(10, 16)
    owners, fresh, random_, check = [], 0, draw.random, pages.check
    tokens = [[i] * 48 for i in range(4)]
    for _ in range(steps):
        roll = random_()
        if roll < 0.35 or not owners:
            fresh += 1
            pages.attach_prefix(fresh, tokens[fresh & 3][: 16 * (fresh % 4)], "w")
            owners.append(fresh)
        elif roll < 0.6:
            owner = owners[int(random_() * len(owners))]
            try:
                pages.allocate(owner, 1)
                pages.make_private(owner, 0)
            except OutOfPages:
                pages.free(owner)
                owners.remove(owner)
        elif roll < 0.7 and len(owners) < 6:
            fresh += 1
            pages.fork(owners[int(random_() * len(owners))], fresh)
            owners.append(fresh)
        else:
            owner = owners.pop(int(random_() * len(owners)))
            held = min(len(pages.pages(owner)), 3)
            pages.register(owner, tokens[owner & 3][: 16 * held], "w")
            pages.free(owner)
        check()
    for owner in owners:
        pages.free(owner)
    check()
    assert pages.available == pages.num_pages


def test_a_million_random_operations_with_every_invariant_after_each():
    churn(1_000_000, seed=0)


WHO = st.integers(0, 9)


class Machine(RuleBasedStateMachine):
    """Hypothesis looks for the shortest story in which the allocator goes wrong."""

    def __init__(self):
        super().__init__()
        self.world = World(num_pages=6, page_size=32)

    def owner(self, who):
        owners = list(self.world.text)
        return owners[who % len(owners)]

    @rule(
        stem=st.sampled_from([0, 16, 32, 40]),
        rest=st.integers(0, 20),
        scope=st.sampled_from(SCOPES),
    )
    def start(self, stem, rest, scope):
        self.world.start([7] * stem + [rest % 3] * rest, scope)

    @precondition(lambda self: self.world.text)
    @rule(who=WHO, count=st.sampled_from([1, 5, 16, 33]))
    def write(self, who, count):
        self.world.write(self.owner(who), [7] * count)

    @precondition(lambda self: self.world.text)
    @rule(who=WHO)
    def fork(self, who):
        self.world.fork(self.owner(who))

    @precondition(lambda self: self.world.text)
    @rule(who=WHO, register=st.booleans())
    def end(self, who, register):
        self.world.end(self.owner(who), register)

    @precondition(lambda self: self.world.text)
    @rule(who=WHO)
    def seal(self, who):
        owner = self.owner(who)
        self.world.pages.register(owner, self.world.text[owner], self.world.scope[owner])

    @rule()
    def forget(self):
        self.world.pages.clear_prefixes()

    @invariant()
    def everything_adds_up(self):
        self.world.pages.check()
        for owner in list(self.world.text)[-2:]:
            self.world.read(owner)

    def teardown(self):
        for owner in list(self.world.text):
            self.world.read(owner)
            self.world.end(owner, register=False)
        assert self.world.pages.available == self.world.pages.num_pages


def stories(count):
    """Stories of 100 rules each."""
    return settings(
        max_examples=count,
        stateful_step_count=100,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def test_fifty_thousand_rules_find_no_story_that_goes_wrong():
    run_state_machine_as_test(Machine, settings=stories(500))


@pytest.mark.slow
def test_a_million_rules_find_no_story_that_goes_wrong():
    run_state_machine_as_test(Machine, settings=stories(10_000))


def allocator(**held):
    pages = PageAllocator(8, 16)
    for owner, count in held.items():
        pages.allocate(owner, count)
    return pages


def test_a_double_free_raises_and_names_the_owner():
    pages = allocator(a=2)
    pages.free("a")
    with pytest.raises(ValueError, match="owner 'a' holds no page"):
        pages.free("a")
    pages.check()


def test_use_after_free_raises():
    pages = allocator(a=2)
    pages.free("a")
    for use in (pages.pages, lambda a: pages.make_private(a, 0), lambda a: pages.fork(a, "b")):
        with pytest.raises(ValueError, match="'a'"):
            use("a")
    pages.check()


def test_freeing_anothers_page_raises_naming_page_and_holder():
    pages = allocator(a=2, b=1)
    with pytest.raises(ValueError, match=r"page 2 is not of 'a': held by \['b'\]"):
        pages.free("a", [2])
    pages.check()
    pages.free("a", [1])
    with pytest.raises(ValueError, match="page 1 is not of 'a': it is free"):
        pages.free("a", [1])
    pages.check()


def test_running_out_leaves_everything_as_it_was():
    pages = allocator(a=6)
    with pytest.raises(OutOfPages, match="needs 3 pages, 2 of 8"):
        pages.allocate("b", 3)
    assert pages.owners == ["a"] and pages.available == 2
    pages.allocate("a", 2)
    pages.fork("a", "c")
    with pytest.raises(OutOfPages, match="cannot copy shared page"):
        pages.make_private("c", 0)
    assert pages.pages("c") == pages.pages("a")
    pages.check()


def test_a_shared_page_is_copied_once_and_then_owned():
    pages = allocator(a=2)
    pages.fork("a", "b")
    copy = pages.make_private("b", 1)
    assert (copy.source, copy.target) == (1, 2)
    assert pages.make_private("b", 1) is None and pages.make_private("a", 1) is None
    assert pages.pages("a") == [0, 1] and pages.pages("b") == [0, 2]


def test_a_hit_inside_a_page_is_copied_and_whole_pages_are_shared():
    pages = PageAllocator(8, 64)
    pages.allocate("a", 2)
    pages.register("a", range(100), "w")
    hit = pages.attach_prefix("b", range(100), "w")
    assert hit.tokens == 96 and hit.copy.source == 1
    assert pages.pages("b") == [0, hit.copy.target] and hit.copy.target not in pages.pages("a")


def test_a_link_across_the_border_of_two_pages_needs_both():
    pages = PageAllocator(8, 24)
    pages.allocate("a", 2)
    pages.register("a", range(40), "w")
    hit = pages.attach_prefix("b", range(40), "w")
    assert hit.tokens == 32 and hit.copy.source == 1 and pages.pages("b")[0] == 0
    pages.free("b")
    pages.free("a", [1])
    pages.allocate("c", 7)  # takes the second page, too: what lay across the border is gone
    pages.free("c")
    assert pages.attach_prefix("d", range(40), "w").tokens == 16
    pages.check()


def test_the_least_recently_used_prefix_is_evicted_first():
    pages = PageAllocator(4, 16)
    for owner in range(4):
        pages.allocate(owner, 1)
        pages.register(owner, [owner] * 16, "w")
    for owner in (2, 0, 1, 3):
        pages.free(owner)
    assert pages.attach_prefix("again", [2] * 16, "w").tokens == 16
    pages.free("again")  # now the most recent
    pages.allocate("new", 2)
    found = [pages.attach_prefix(("look", i), [i] * 16, "w").tokens for i in range(4)]
    assert found == [0, 0, 16, 16]


def test_the_end_of_a_prefix_is_evicted_before_its_beginning():
    pages = PageAllocator(3, 16)
    pages.allocate("a", 3)
    pages.register("a", range(48), "w")
    pages.free("a")
    pages.allocate("b", 1)
    assert pages.attach_prefix("c", range(48), "w").tokens == 32


def test_other_weights_find_nothing():
    pages = PageAllocator(4, 16)
    pages.allocate("a", 2)
    pages.register("a", range(32), "step 10")
    assert pages.attach_prefix("b", range(32), "step 11").tokens == 0
    assert pages.attach_prefix("c", range(32), "step 10").tokens == 32


@pytest.mark.parametrize("seed", range(3))
def test_an_eight_bit_hash_never_gives_a_wrong_hit(seed):
    """Collisions are certain; the comparison of tokens must catch each one (`start` reads back)."""
    hits, _, _ = play(3_000, seed, digest=lambda data: bytes([sum(data) % 251]), page_size=16)
    assert hits > 30


def broken(name):
    """An allocator with one seeded fault."""
    faults = {
        "a shared page is written": ("own", lambda self, owner, index: None),
        "a freed page keeps its count": ("_release", lambda self, pages: None),
        "a hit is not held": ("_hold", lambda self, page: None),
        "a fork holds nothing": ("fork", _careless_fork),
        "a free page stays registered": ("_evict", _careless_evict),
        "a cached page is handed out and kept": ("_take", _careless_take),
        "freed twice": ("_release", _double_release),
    }
    method, fault = faults[name]
    return type("Broken", (PageAllocator,), {method: fault})


def _careless_fork(self, parent, child):
    self._tables[child] = list(self._tables[parent])


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
        "a fork holds nothing",
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
        original = PrefixIndex._chunks
        monkeypatch.setattr(PrefixIndex, "_chunks", lambda self, t, scope: original(self, t, ""))
        digest = sha256
    else:
        monkeypatch.setattr(PrefixIndex, "find", _trusting_find)
        digest = lambda data: bytes([sum(data) % 251])  # noqa: E731
    with pytest.raises(AssertionError):
        play(4_000, seed=1, digest=digest, page_size=16)


def _trusting_find(self, tokens, scope):
    """Take every key's word for it."""
    pages = []
    for key, _ in self._chunks(tokens, scope):
        if key not in self._links:
            break
        pages.append(self._links[key].pages[0])
    return 16 * len(pages), pages
