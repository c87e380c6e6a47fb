"""The prefix index on its own: what is dropped with a page, and what the collector has to visit."""

import gc

import numpy as np
from nopad.attention.paging.prefix import PrefixIndex


def test_what_follows_a_page_is_dropped_with_it():
    index = PrefixIndex(16)
    index.register(range(48), [0, 1, 2], "w")
    index.register([*range(16), *range(100, 116)], [0, 3], "w")
    assert sorted(index.drop(1)) == [1, 2]
    assert index.find(range(48), "w") == (16, [0])
    assert sorted(index.drop(0)) == [0, 3]
    assert index.pages() == set()


def test_links_are_dropped_from_the_first_page_that_is_gone():
    """Both compute the same tokens; each registers what the other has not yet."""
    tokens, index = range(64), PrefixIndex(64)
    index.register(tokens[:16], [0], "w")
    index.register(tokens[:32], [1], "w")
    index.register(tokens, [0], "w")
    assert index.find(tokens, "w") == (64, [0])
    assert index.drop(1) == [1]
    assert index.find(tokens, "w") == (16, [0])
    index.register(tokens[:48], [2], "w")
    assert index.find(tokens, "w") == (48, [2])


def test_a_sequence_that_repeats_itself_under_one_key_is_not_found_twice():
    index = PrefixIndex(16, digest=lambda data: b"k")
    index.register([7] * 16, [0], "w")
    assert index.find([7] * 48, "w") == (16, [0])


def test_the_garbage_collector_does_not_visit_links():
    index = PrefixIndex(256)
    gc.collect()
    before = len(gc.get_objects())
    index.register(np.arange(65536), range(256), "w")
    gc.collect()
    assert len(gc.get_objects()) - before < 2 * 256 + 100  # of 4,096 links
