"""Lists, iterables, functions and iterators."""

import json
from itertools import islice

import pytest
from nopad.packing import PackedDataset
from torch.utils.data import DataLoader


def test_a_function_is_called_again_for_every_epoch(tools):
    rows = tools.documents(50)
    data = PackedDataset(lambda: iter(rows), budget=128, pool=4, epochs=2, shuffle=False)
    assert sum(len(pack.tokens) for pack in data) == 2 * sum(map(len, rows))


def test_an_iterator_is_read_once_and_continued_with_a_fresh_one(tools):
    rows = tools.documents(80)

    def make():
        return PackedDataset(iter(rows), budget=64, pool=8, shuffle=8)

    data = make()
    packs = iter(data)
    head = [tools.digest(pack) for pack in islice(packs, 9)]
    state = json.loads(json.dumps(data.state_dict()))
    again = make()
    again.load_state_dict(state)
    assert head + [tools.digest(p) for p in again] == [tools.digest(p) for p in make()]


def test_an_iterator_cannot_give_a_second_epoch_or_shard(tools):
    rows = tools.documents(30)
    with pytest.raises(ValueError, match="only once"):
        list(PackedDataset(iter(rows), budget=64, epochs=2))
    with pytest.raises(ValueError, match="only once"):
        list(PackedDataset(iter(rows), budget=64, shards=2))


def test_an_iterable_of_one_shard_does_not_feed_two_workers(tools):
    data = PackedDataset(lambda: iter(tools.documents(30)), budget=64)
    with pytest.raises(ValueError, match="do not divide 1 shards"):
        list(DataLoader(data, batch_size=None, num_workers=2))


@pytest.mark.parametrize("ahead", [True, False])
def test_a_list_is_shuffled_wholly_and_every_epoch_anew(ahead):
    rows = [[i, i] for i in range(100)]
    data = PackedDataset(rows, budget=2, pool=1, epochs=2, ahead=ahead, shards=1)
    order = [int(pack.tokens[0]) for pack in data]
    first, second = order[:100], order[100:]
    assert sorted(first) == sorted(second) == list(range(100)) and first != second


def test_an_empty_source_is_said_to_be_empty():
    with pytest.raises(ValueError, match="nothing to pack"):
        list(PackedDataset([], budget=8))
