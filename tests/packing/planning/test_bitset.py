"""The bitset finds what a sorted list finds."""

from bisect import bisect_right

from hypothesis import given, settings
from hypothesis import strategies as st
from nopad.packing.planning.bitset import (
    add,
    contains,
    discard,
    empty_bitset,
    largest_at_most,
)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 20_000), st.data())
def test_searches_agree_with_a_sorted_list(largest, data):
    values = st.integers(0, largest)
    low, high = empty_bitset(largest)
    members = set()
    for value, keep in data.draw(st.lists(st.tuples(values, st.booleans()), max_size=40)):
        (add if keep else discard)(low, high, value)
        (members.add if keep else members.discard)(value)
    ordered = sorted(members)
    for bound in [0, largest, *data.draw(st.lists(values, max_size=20)), *ordered]:
        at = bisect_right(ordered, bound)
        found = ordered[at - 1] if at else -1
        assert largest_at_most(low, high, bound) == found
        assert contains(low, bound) == (bound in members)
