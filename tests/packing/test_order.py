"""Order: where a document comes depends on nothing but chance, in sets of every size."""

from itertools import pairwise

import numpy as np
import pytest
from nopad.packing import PackedDataset, pack_lengths
from nopad.packing.ordering import permute, shuffle_key
from order_metrics import correlation, is_chance, meeting_ratio, places

SEEDS = 20


def lengths_of(kind: str, count: int) -> np.ndarray:
    rng = np.random.default_rng(count)
    if kind == "chats":
        return np.clip(rng.normal(250, 90, count), 20, 700).astype(int)
    return np.clip(rng.lognormal(4, 1, count), 2, 800).astype(int)


def reader_of(lengths, budget: int, **settings):
    """The reader of a dataset of these lengths; its seed may be changed."""
    rows = [{"input_ids": [1] * int(length)} for length in lengths]
    return PackedDataset(rows, budget=budget, **settings).reader


def epoch_packs(reader, seed: int, epoch: int) -> list[np.ndarray]:
    reader.settings.seed = seed
    return [pack for plan in reader.plans(epoch) for pack in plan]


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize("count, multiple", [(50, 3), (300, 10), (600, 2), (1500, 4), (1500, 30)])
@pytest.mark.parametrize("kind", ["chats", "documents"])
def test_a_place_tells_nothing_of_length_epoch_or_seed(kind, count, multiple, balance):
    lengths = lengths_of(kind, count)
    budget = max(int(lengths.mean() * multiple), int(lengths.max()))
    reader = reader_of(lengths, budget, balance=balance)
    found = [
        [places(epoch_packs(reader, seed, epoch), count) for epoch in (0, 1)]
        for seed in range(SEEDS)
    ]
    assert is_chance([correlation(lengths, place) for place, _ in found])
    assert is_chance([correlation(place, later) for place, later in found])
    assert is_chance([correlation(a[0], b[0]) for a, b in pairwise(found)])


@pytest.mark.parametrize("count, multiple", [(50, 3), (300, 4), (1000, 4), (3000, 4), (1000, 10)])
@pytest.mark.parametrize("kind", ["chats", "documents"])
def test_documents_that_shared_a_pack_meet_again_by_chance_only(kind, count, multiple):
    lengths = lengths_of(kind, count)
    budget = max(int(lengths.mean() * multiple), int(lengths.max()))
    reader = reader_of(lengths, budget)
    ratios = [
        meeting_ratio(epoch_packs(reader, seed, 0), places(epoch_packs(reader, seed, 1), count))
        for seed in range(60 if count == 50 else 10)
    ]
    assert np.mean(ratios) <= 2


@pytest.mark.smoke("order")
def test_no_pack_of_a_small_set_comes_back():
    lengths = lengths_of("documents", 300)
    reader = reader_of(lengths, int(lengths.mean() * 10))
    runs = [
        {tuple(sorted(pack.tolist())) for pack in epoch_packs(reader, seed, epoch)}
        for seed, epoch in [(0, 0), (0, 1), (0, 2), (1, 0)]
    ]
    assert all(len(runs[0] & other) == 0 for other in runs[1:])


@pytest.mark.parametrize(
    "kind, multiple, fill", [("chats", 2, 96.3), ("chats", 4, 99.3), ("documents", 4, 99.3)]
)
def test_chance_costs_a_small_set_no_packs(kind, multiple, fill):
    lengths = lengths_of(kind, 600)
    budget = max(int(lengths.mean() * multiple), int(lengths.max()))
    reader = reader_of(lengths, budget)
    packs = [len(epoch_packs(reader, seed, 0)) for seed in range(5)]
    fewest = int(lengths.sum()) / budget
    assert 100 * fewest / np.mean(packs) > min(fill, 99.5 * fewest / np.ceil(fewest))


@pytest.mark.parametrize("kind", ["chats", "documents"])
def test_a_stream_does_not_put_long_documents_last(kind):
    lengths = lengths_of(kind, 3000)
    budget = max(int(lengths.mean() * 4), int(lengths.max()))
    found = []
    for seed in range(SEEDS):
        order = permute(np.arange(3000), 3000, shuffle_key(seed))
        found.append(
            correlation(lengths[order], places(pack_lengths(lengths[order], budget), 3000))
        )
    assert is_chance(found)


def test_a_stream_does_not_put_documents_without_a_partner_last():
    count = 4000
    lengths = np.random.default_rng(4).lognormal(np.log(230), 0.42, count).astype(int)
    budget = 2 * int(lengths.mean())
    lengths = np.clip(lengths, 60, budget)
    found = []
    for seed in range(SEEDS):
        order = permute(np.arange(count), count, shuffle_key(seed))
        place = places(pack_lengths(lengths[order], budget), count)
        found.append(correlation(lengths[order] > 0.8 * budget, place))
    assert is_chance(found)
