"""The page allocator: random operations against a model of it, misuse, sharing and eviction."""

import random

import pytest
from allocator_world import play
from nopad.attention.paging import PageAllocator
from nopad.attention.paging.allocator import OutOfPages


@pytest.mark.parametrize("page_size", [16, 32, 48, 64])
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
            except OutOfPages:
                pages.free(owner)
                owners.remove(owner)
        else:
            owner = owners.pop(int(random_() * len(owners)))
            num_pages = min(len(pages.pages(owner)), 3)
            pages.register(owner, tokens[owner & 3][: 16 * num_pages], "w")
            pages.free(owner)
        check()
    for owner in owners:
        pages.free(owner)
    check()
    assert pages.available == pages.num_pages


@pytest.mark.parametrize("steps", [60_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_random_operations_with_every_invariant_after_each(steps):
    churn(steps, seed=0)


def allocator(**counts):
    """An allocator of eight pages, and how many of them each owner holds."""
    pages = PageAllocator(8, 16)
    for owner, count in counts.items():
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
    for use in (pages.pages, lambda a: pages.register(a, [], "w")):
        with pytest.raises(ValueError, match="'a'"):
            use("a")
    pages.check()


@pytest.mark.parametrize("shape", [(0, 16), (4, 0), (4, 24)])
def test_impossible_pages_are_refused(shape):
    with pytest.raises(ValueError, match=f"got {shape[0]} pages of {shape[1]} tokens"):
        PageAllocator(*shape)


def test_running_out_leaves_everything_as_it_was():
    pages = allocator(a=6)
    with pytest.raises(OutOfPages, match="needs 3 pages, 2 of 8"):
        pages.allocate("b", 3)
    assert pages.owners == ["a"] and pages.available == 2
    pages.check()


def test_a_hit_inside_a_page_is_copied_and_whole_pages_are_shared():
    pages = PageAllocator(8, 64)
    pages.allocate("a", 2)
    pages.register("a", range(100), "w")
    hit = pages.attach_prefix("b", range(100), "w")
    assert hit.tokens == 96 and hit.copy.source == 1
    assert pages.pages("b") == [0, hit.copy.target] and hit.copy.target not in pages.pages("a")


def test_without_a_page_for_the_copy_the_hit_ends_at_the_page_before():
    pages = PageAllocator(2, 64)
    pages.allocate("a", 2)
    pages.register("a", range(100), "w")
    hit = pages.attach_prefix("b", range(100), "w")
    assert (hit.tokens, hit.copy, pages.pages("b")) == (64, None, [0])
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
    tokens = [pages.attach_prefix(("look", i), [i] * 16, "w").tokens for i in range(4)]
    assert tokens == [0, 0, 16, 16]


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
