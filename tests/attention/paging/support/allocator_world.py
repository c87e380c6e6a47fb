"""A model of the allocator: a dict of what every page must hold.

The model plays the cache: it remembers, per page and slot, which token was written there and with
which weights. Whatever the allocator decides, an owner must always read back its own text.
"""

import random

from nopad.attention.paging import PageAllocator
from nopad.attention.paging.allocator import OutOfPages

SCOPES = ("weights 0", "weights 1")


class World:
    """An allocator, a fake cache, and the text that each owner has written."""

    def __init__(self, num_pages=24, page_size=32, **options):
        self.pages = PageAllocator(num_pages, page_size, **options)
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
        self.read(owner)  # a hit must be this text, computed by these weights
        self.write(owner, tokens[hit.tokens :])
        return owner, hit

    def write(self, owner, tokens):
        """Append tokens as a forward does: allocate, then write; False: no pages."""
        text = self.text[owner]
        num_pages = len(self.pages.pages(owner))
        try:
            need = -(-(len(text) + len(tokens)) // self.size) - num_pages
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
        for position, token in enumerate(self.text[owner]):
            content = self.cache[table[position // self.size], position % self.size]
            assert content == (token, self.scope[owner]), "an owner read what it did not write"

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


def play(steps, seed, check_every=1, **options):
    """Make random operations; return the numbers of prefix hits, copies and refused writes."""
    draw, world = random.Random(seed), World(**options)
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
