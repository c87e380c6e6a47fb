"""The states of ranks are merged into the state of the run."""

import pytest
from nopad.packing.state import merge_states


def test_states_of_ranks_at_different_places_are_not_merged():
    states = [{"position": {"index": i}, "shards": {str(i): {}}} for i in (4, 8)]
    with pytest.raises(ValueError, match="different positions"):
        merge_states(states)


def test_places_of_one_shard_that_contradict_each_other_are_not_merged():
    states = [{"position": {"index": 4}, "shards": {"1": {"packs_since": made}}} for made in (4, 8)]
    with pytest.raises(ValueError, match="different cursors of shard 1"):
        merge_states(states)
