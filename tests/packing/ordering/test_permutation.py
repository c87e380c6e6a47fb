"""The order of a run is a pure function of integers."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from nopad.packing.ordering import permute, shuffle_key


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**40))
def test_a_shuffle_is_a_permutation(n, seed):
    assert np.sort(permute(np.arange(n), n, shuffle_key(seed))).tolist() == list(range(n))


def test_a_place_is_the_same_whoever_asks_for_it():
    n, places = 10_007, np.array([0, 17, 9_999, 4])
    assert (
        permute(np.arange(n), n, shuffle_key(1))[places].tolist()
        == permute(places, n, shuffle_key(1)).tolist()
    )


def test_shuffles_of_other_keys_differ_and_show_no_trend():
    n = 100_000
    one, other = (permute(np.arange(n), n, shuffle_key("epoch", 0, epoch)) for epoch in (0, 1))
    assert (one == other).mean() < 1e-3
    assert abs(np.corrcoef(np.arange(n), one)[0, 1]) < 0.02
    assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < 0.02


def test_every_document_comes_to_every_place_about_as_often():
    n, trials = 13, 4000
    counts = np.zeros((n, n))
    for seed in range(trials):
        counts[np.arange(n), permute(np.arange(n), n, shuffle_key(seed))] += 1
    assert counts.min() > 0.7 * trials / n and counts.max() < 1.3 * trials / n
