"""Shares of ranks and workers, and the rounds of one pack per rank."""

from hypothesis import given, settings
from hypothesis import strategies as st
from nopad.packing.ordering import RankShare


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 50), st.integers(1, 6), st.integers(1, 4))
def test_shares_cover_every_pack_once_and_in_the_order_a_loader_collects(base, world_size, workers):
    total, seen = 5 * world_size * workers, []
    for rank in range(world_size):
        for worker in range(workers):
            share = RankShare(rank, world_size, worker, workers)
            own = list(range(share.first(base), base + total, share.stride))
            assert all(pack % world_size == rank for pack in own)
            seen += own
    assert sorted(seen) == list(range(base, base + total))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 6))
def test_rounds_hold_one_pack_of_every_rank(base, offset, world_size):
    share, index = RankShare(0, world_size), base + offset
    begin, end = share.round_start(index, base), share.round_end(index, base)
    assert begin <= index < end and end - begin == world_size and (begin - base) % world_size == 0
    assert sorted(pack % world_size for pack in range(begin, end)) == list(range(world_size))
