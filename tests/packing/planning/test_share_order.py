"""The packs of an interval are ordered so that the sources' shares stay even."""

import numpy as np
import pytest
from nopad.packing.planning import Plan
from nopad.packing.planning.share_order import order_by_shares


@pytest.mark.parametrize("num_sources, packs", [(2, 40), (3, 300), (5, 600)])
def test_sources_stay_within_a_pack_of_their_shares(num_sources, packs):
    rng = np.random.default_rng(packs)
    lengths, offsets = np.full(2 * packs, 50), np.arange(0, 2 * packs + 1, 2)
    plan = Plan(np.arange(2 * packs), np.zeros(2 * packs, int), lengths, offsets)
    sources = rng.integers(0, num_sources, 2 * packs)
    ordered = order_by_shares(plan, sources, num_sources, budget=100)
    assert sorted(map(tuple, ordered)) == sorted(map(tuple, plan))
    counts = np.eye(num_sources)[sources[ordered.items]].cumsum(0)[1::2] / 2
    expected = np.arange(1, packs + 1)[:, None] * counts[-1] / packs
    assert np.abs(counts - expected).max() <= 1
