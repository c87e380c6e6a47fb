"""The end of a pass: the next pass continues from it, for any readers before and after."""

import itertools
import json
from functools import partial

import pytest
from nopad.packing import PackedDataset, Sample
from nopad.packing.sources import TokenArray, TokenStore
from nopad.packing.state import merge_states
from torch.utils.data import DataLoader

torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is missing")
StatefulDataLoader = torchdata.StatefulDataLoader

pytestmark = pytest.mark.filterwarnings("ignore")
KINDS = (
    "planned",
    "leveled",
    "store",
    "planned mixture",
    "sharded",
    "sharded mixture",
    "drifting mixture",
    "function",
)


@pytest.fixture
def make(tools, jsonl):
    """Return a function that opens a dataset of each kind for one rank."""
    rows = tools.documents(60)
    path, other = jsonl(rows), jsonl(rows[:20], "other.jsonl")
    sources = {
        "store": TokenStore([TokenArray.of([Sample(row) for row in rows])]),
        "planned mixture": [(rows, 2), (rows[:20], 1)],
        "sharded": path,
        "sharded mixture": [(path, 2), (other, 1)],
        "drifting mixture": [(path, [(0, 3), (2000, 0.1)]), (other, [(0, 0.1), (2000, 1)])],
        "function": lambda: iter(rows),
    }

    def open_one(kind, rank=0, world_size=1, **options):
        options = {"budget": 64, "pool": 6, "rank": rank, "world_size": world_size, **options}
        if kind in ("sharded", "sharded mixture", "drifting mixture", "function"):
            options |= {"shards": 4, "shuffle": 8, "pretokenize": False}
        if "mixture" in kind:
            options["stopping_strategy"] = "all_exhausted_without_replacement"
        return PackedDataset(sources.get(kind, rows), balance=kind == "leveled", **options)

    return open_one


def one_pass(tools, packs):
    return [tools.digest(pack) for pack in packs]


def saved(data):
    return json.loads(json.dumps(data.state_dict()))


def loaded(data, state):
    data.load_state_dict(state)
    return data


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "end", [{}, {"epochs": 2}, {"max_packs": 9}, {"epochs": None, "max_packs": 21}]
)
def test_a_state_of_a_pass_that_is_over_goes_on_with_the_next(make, tools, kind, end):
    data, passes, states = make(kind, **end), [], []
    for _ in range(3):
        passes.append(one_pass(tools, data))
        states.append(saved(data))
    assert passes[0] and passes[0] != passes[1] != passes[2]
    for number, state in enumerate(states[:2], 1):
        again = loaded(make(kind, **end), state)
        assert saved(again) == state, "a load alone changed it"
        assert [one_pass(tools, again) for _ in passes[number:]] == passes[number:]


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_the_second_pass_knows_what_the_first_left_to_it(make, tools, kind):
    data, states = make(kind), []
    list(data)
    packs = []
    for pack in data:
        packs.append(tools.digest(pack))
        states.append(saved(data))
    for number in (1, 2, 3, 5, len(packs) - 1):
        rest = one_pass(tools, loaded(make(kind), states[number - 1]))
        assert rest == packs[number:]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_of_a_pass_behind_its_last_pack(make, tools, kind):
    whole = make(kind)
    first, second = one_pass(tools, whole), one_pass(tools, whole)
    data = make(kind)
    assert [tools.digest(pack) for pack in itertools.islice(data, len(first))] == first
    again = loaded(make(kind), saved(data))
    assert [one_pass(tools, again) for _ in range(2)] == [[], second]


@pytest.mark.parametrize("kind", ["planned", "store", "sharded"])
@pytest.mark.parametrize("before", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_the_next_pass_is_the_same_for_other_ranks_and_workers(make, tools, kind, before):
    for end in ({"max_packs": 13}, {"epochs": None, "max_packs": 13}):

        def build(rank=0, world_size=1, end=end):
            return make(kind, rank, world_size, **end)

        alone = build()
        passes = [one_pass(tools, alone) for _ in range(2)]
        run = tools.Run(build, *before)
        assert one_pass(tools, run.packs())[:13] == passes[0]
        state = merge_states([main.end_pass() for main in run.mains])
        for after in ((1, 1), (4, 1), (2, 2)):
            again = tools.Run(build, *after).load(state)
            found = one_pass(tools, again.packs())
            assert found[:13] == passes[1] and not any(content for _, content in found[13:])
            assert again.saved()["position"]["index"] == -(-13 // after[0]) * after[0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_with_an_uneven_end_go_on_together(make, tools, world_size):
    """The last round may begin in the epoch before, if epochs are shorter than a round."""
    rows = [[n + 1] * 8 for n in range(4)]

    def build(rank=0, world_size=1):
        return PackedDataset(rows, budget=8, epochs=2, rank=rank, world_size=world_size)

    alone = build()
    passes = [one_pass(tools, alone) for _ in range(2)]
    ranks = [build(rank, world_size) for rank in range(world_size)]
    for data in ranks:
        one_pass(tools, data)
    state = merge_states([saved(data) for data in ranks])
    found = [one_pass(tools, loaded(build(rank, world_size), state)) for rank in range(world_size)]
    together = [pack for some in zip(*found, strict=True) for pack in some]
    assert together[:8] == passes[1] and not any(content for _, content in together[8:])
    assert one_pass(tools, loaded(build(), state)) == passes[1]


@pytest.mark.parametrize("kind", ["planned", "sharded"])
def test_workers_that_read_the_next_pass_have_their_packs_counted(make, tools, kind):
    whole = make(kind)
    one_pass(tools, whole)
    data, second, seen = loaded(make(kind), saved(whole)), one_pass(tools, whole), []
    for pack in DataLoader(data, batch_size=None, num_workers=2):
        data.mark_trained(pack)
        seen.append(tools.digest(pack))
        if len(seen) == 6:
            break
    assert seen == second[:6]
    assert one_pass(tools, loaded(make(kind), saved(data))) == second[6:]


@pytest.mark.parametrize("kind", ["planned", "sharded"])
def test_a_pass_that_was_read_ahead_is_over_once_all_was_stepped(make, tools, kind):
    data = make(kind)
    packs = list(data)
    data.mark_trained(*packs[:-1])
    rest = one_pass(tools, loaded(make(kind), saved(data)))
    assert rest == [tools.digest(packs[-1])]
    data.mark_trained(packs[-1])
    second = one_pass(tools, loaded(make(kind), saved(data)))
    assert second == one_pass(tools, data) != []


@pytest.mark.parametrize("kind", ["planned", "sharded"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_goes_on_with_what_it_would_have_given(make, tools, kind, workers):
    def build():
        return StatefulDataLoader(make(kind), batch_size=None, num_workers=workers)

    loader = build()
    first, state = one_pass(tools, loader), loader.state_dict()
    second = one_pass(tools, loader)
    again = build()
    again.load_state_dict(state)
    assert first and one_pass(tools, again) == second


@pytest.mark.parametrize("before, after", [(1, 3), (2, 3), (1, None)])
def test_a_pass_that_was_over_goes_on_where_it_may_be_longer(make, tools, before, after):
    whole = one_pass(tools, make("leveled", epochs=3))
    data = make("leveled", epochs=before)
    done = one_pass(tools, data)
    again = loaded(make("leveled", epochs=after), saved(data))
    rest = one_pass(tools, itertools.islice(again, len(whole) - len(done)))
    assert done + rest == whole
    if after is not None:
        assert not any(True for _ in loaded(make("leveled", epochs=after), saved(again)))


@pytest.mark.parametrize("kind", ["planned", "sharded"])
def test_a_pass_that_packs_ended_goes_on_where_there_may_be_more(make, tools, kind):
    whole = one_pass(tools, make(kind, epochs=None, max_packs=20))
    data = make(kind, epochs=None, max_packs=12)
    done = one_pass(tools, data)
    assert (
        done + one_pass(tools, loaded(make(kind, epochs=None, max_packs=20), saved(data))) == whole
    )


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    "kind, first, longer",
    [
        ("leveled", {"epochs": 1}, {"epochs": 2}),
        ("planned", {"epochs": 2, "max_packs": 17}, {"epochs": 3}),
        ("planned", {"epochs": None, "max_packs": 13}, {"epochs": None, "max_packs": 25}),
        ("sharded", {"max_packs": 13}, {"max_packs": 18}),
    ],
)
def test_a_longer_pass_has_the_packs_that_empty_ones_stood_for(
    make, tools, kind, first, longer, world_size
):
    """Empty packs complete the last round of the ranks: they are none of the sequence."""

    def run(world_size, options):
        return tools.Run(partial(make, kind, **options), world_size)

    whole = tools.full(run(1, longer).packs())
    short = run(4, first)
    done = tools.full(short.packs())
    assert len(done) % 4, "the last round is complete: the case tests nothing"
    assert done + tools.full(run(world_size, longer).load(short.saved()).packs()) == whole


@pytest.mark.parametrize("kind", ["planned", "sharded"])
def test_a_shorter_pass_that_has_no_packs_left_is_refused(make, kind):
    data = make(kind, epochs=None, max_packs=12)
    for pack in itertools.islice(data, 9):
        data.mark_trained(pack)
    for max_packs in (5, 9):
        with pytest.raises(ValueError, match=f"at pack 9, max_packs={max_packs}: no packs are"):
            make(kind, epochs=None, max_packs=max_packs).load_state_dict(saved(data))


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_shards_without_rows_can_be_counted_and_resumed(tools, jsonl, workers):
    path = jsonl([[1, 2, 3], [4, 5, 6]])

    def build(rank=0, world_size=1):
        options = {"shards": 8, "pretokenize": False, "rank": rank, "world_size": world_size}
        return PackedDataset(path, budget=4, epochs=3, **options)

    whole = tools.full(build())
    run, found = tools.Run(build, 1, workers), []
    for pack in run.packs():
        found += tools.full([pack])
        state = run.saved()
        for other in (1, 8):
            assert found + tools.full(tools.Run(build, 1, other).load(state).packs()) == whole
    assert found == whole


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_stream_of_one_rank_ends_before_max_packs(make, tools, workers):
    """Empty packs up to `max_packs` would be steps that train nothing."""
    whole = tools.full(make("sharded"))
    run = tools.Run(partial(make, "sharded", max_packs=1000), 1, workers)
    packs = list(run.packs())
    assert tools.full(packs) == whole and len(packs) < len(whole) + 4


def test_two_iterators_of_a_stream_end_each(make, tools):
    data = make("sharded")
    first, second = iter(data), iter(data)
    packs = [next(first), next(second)]
    assert tools.full(packs[:1] + list(first)) == tools.full(packs[1:] + list(second))


@pytest.mark.parametrize("field, value", [("finished", 1), ("finished", None), ("max_packs", -1)])
def test_an_end_that_cannot_be_is_refused(make, field, value):
    with pytest.raises(ValueError, match=f"the state's {field} is {value}"):
        make("planned").load_state_dict({**make("planned").state_dict(), field: value})


def test_a_pass_of_endless_data_may_be_ended_too(make, tools):
    data = make("planned", epochs=None)
    first = one_pass(tools, itertools.islice(data, 3))
    data.end_pass()
    following = one_pass(tools, itertools.islice(data, 3))
    assert [at for at, _ in following] == [at for at, _ in first] and following != first
