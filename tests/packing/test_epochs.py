"""Passes and epochs: each has its own order, and `set_epoch` goes to it."""

import pytest
from nopad.packing import PackedDataset
from torch.utils.data import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_pass_follows_a_pass_with_the_next_epochs_order(make, tools):
    data = make("planned")
    first, second = tools.full(data), tools.full(data)
    assert first != second
    data.set_epoch(0)
    assert tools.full(data) == first
    data.set_epoch(1)
    assert tools.full(data) == second


def test_through_workers_set_epoch_moves_on(make, tools):
    plain = make("planned")
    orders = [tools.full(plain) for _ in range(2)]
    data = make("planned")
    loader = DataLoader(data, batch_size=None, num_workers=1)
    assert [tools.full(loader) for _ in range(2)] == [orders[0], orders[0]]
    data.set_epoch(1)
    assert tools.full(loader) == orders[1]


@pytest.mark.parametrize("kind", ["planned", "sharded"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_pass_that_packs_ended_is_followed_by_another_order(make, tools, kind, world_size):
    def passes(rank):
        data = make(kind, rank, world_size, epochs=None, max_packs=16)
        return [[tools.digest(pack) for pack in data] for _ in range(3)]

    ranks = [passes(rank) for rank in range(world_size)]
    one, two, three = (
        [p for pair in zip(*some, strict=True) for p in pair] for some in zip(*ranks, strict=True)
    )
    assert [[index for index, _ in some] for some in (one, two, three)] == [list(range(16))] * 3
    assert len({content for some in (one, two, three) for _, content in some}) == 48
    if kind == "planned":
        data = make(kind, epochs=3)
        later = [tools.digest(pack) for pack in data][data.count(0) :]
        assert [content for _, content in two] == [content for _, content in later[:16]]


@pytest.mark.parametrize("kind", ["planned", "sharded"])
@pytest.mark.parametrize("packs", [1, 11, pytest.param(12, marks=pytest.mark.slow), 16])
@pytest.mark.parametrize(
    "world_size, workers", [(1, 2), pytest.param(2, 1, marks=pytest.mark.slow), (2, 2)]
)
def test_all_readers_begin_the_next_pass_with_the_same_epoch(
    tools, kind, packs, world_size, workers
):
    def build(rank=0, world_size=1):
        rows = [[n + 1] * 8 for n in range(5 if kind == "planned" else 40)]
        options = {} if kind == "planned" else {"shards": 4, "pretokenize": False}
        options |= {"rank": rank, "world_size": world_size, "epochs": None, "max_packs": packs}
        return PackedDataset(rows, budget=8, **options)

    def passes(rank, world_size, workers):
        loader = DataLoader(
            build(rank, world_size),
            batch_size=None,
            num_workers=workers,
            persistent_workers=workers > 0,
            multiprocessing_context="fork" if workers else None,
        )
        return [[tools.digest(pack) for pack in loader] for _ in range(3)]

    alone = passes(0, 1, 0)
    ranks = [passes(rank, world_size, workers) for rank in range(world_size)]
    for one, some in zip(alone, zip(*ranks, strict=True), strict=True):
        together = [pack for round_ in zip(*some, strict=True) for pack in round_]
        assert together[:packs] == one and all(not content for _, content in together[packs:])


def test_set_epoch_does_not_throw_a_resumed_position_away(make, tools):
    data = make("planned")
    packs = iter(data)
    head = [tools.digest(next(packs)) for _ in range(7)]
    state = data.state_dict()
    again = make("planned")
    again.load_state_dict(state)
    again.set_epoch(0)
    assert head + tools.full(again) == tools.full(make("planned"))


def test_set_epoch_after_the_end_repeats_an_epoch(make, tools):
    data = make("planned")
    first = tools.full(data)
    data.set_epoch(0)
    assert tools.full(data) == first
    endless = make("planned", epochs=None)
    packs = iter(endless)
    head = [tools.digest(next(packs)) for _ in range(120)]
    state = endless.state_dict()
    assert state["position"]["epoch"] > 0
    again = make("planned", epochs=None)
    again.load_state_dict(state)
    again.set_epoch(0)
    assert tools.digest(next(iter(again))) == tools.digest(next(packs)) != head[0]
