"""The order of a run is a pure function of integers."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from nopad.packing.ordering import Share, key, shuffled


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**40))
def test_a_shuffle_is_a_permutation(n, seed):
    assert np.sort(shuffled(np.arange(n), n, key(seed))).tolist() == list(range(n))


def test_a_place_is_the_same_whoever_asks_for_it():
    n, places = 10_007, np.array([0, 17, 9_999, 4])
    assert (
        shuffled(np.arange(n), n, key(1))[places].tolist() == shuffled(places, n, key(1)).tolist()
    )


def test_shuffles_of_other_keys_differ_and_show_no_trend():
    n = 100_000
    one, other = (shuffled(np.arange(n), n, key("epoch", 0, epoch)) for epoch in (0, 1))
    assert (one == other).mean() < 1e-3
    assert abs(np.corrcoef(np.arange(n), one)[0, 1]) < 0.02
    assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < 0.02


def test_every_document_comes_to_every_place_about_as_often():
    n, trials = 13, 4000
    counts = np.zeros((n, n))
    for seed in range(trials):
        counts[np.arange(n), shuffled(np.arange(n), n, key(seed))] += 1
    assert counts.min() > 0.7 * trials / n and counts.max() < 1.3 * trials / n


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 50), st.integers(1, 6), st.integers(1, 4))
def test_shares_cover_every_pack_once_and_in_the_order_a_loader_collects(base, world, workers):
    total, seen = 5 * world * workers, []
    for rank in range(world):
        for worker in range(workers):
            share = Share(rank, world, worker, workers)
            own = list(range(share.first(base), base + total, share.stride))
            assert all(pack % world == rank for pack in own)
            seen += own
    assert sorted(seen) == list(range(base, base + total))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 6))
def test_rounds_hold_one_pack_of_every_rank(base, ahead, world):
    share, index = Share(0, world), base + ahead
    begin, end = share.round_start(index, base), share.round_end(index, base)
    assert begin <= index < end and end - begin == world and (begin - base) % world == 0
    assert sorted(pack % world for pack in range(begin, end)) == list(range(world))
