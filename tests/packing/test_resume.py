"""Killed anywhere and resumed, the rest of the stream is bit for bit the same.

Ordered digests of whole packs are compared, never sets or counts.
"""

import itertools
import json
import random

import pytest
from nopad.packing import PackedDataset, Sample
from nopad.packing.sources import TokenArray, TokenStore
from nopad.packing.state import read_state, write_state

TOPOLOGIES = [(world_size, workers) for world_size in (1, 2, 4) for workers in (1, 2, 4)]


def open_list(rows, rank=0, world_size=1, **options):
    return PackedDataset(rows, budget=64, pool=12, rank=rank, world_size=world_size, **options)


def open_stream(path, rank=0, world_size=1, **options):
    options = {"shards": 8, "shuffle": 8, "pretokenize": False, **options}
    return PackedDataset(path, budget=64, pool=6, rank=rank, world_size=world_size, **options)


@pytest.fixture
def kinds(tools, jsonl):
    """Return functions that open each kind of dataset for one rank."""
    rows, path = tools.documents(160), jsonl(tools.documents(120, seed=2))
    store = TokenStore([TokenArray.of([Sample(row) for row in rows])])
    other = jsonl(tools.documents(30, seed=3), "other.jsonl")
    mixture = [(path, 3), (other, 1)]
    return {
        "planned": lambda **o: open_list(store, **o),
        "leveled": lambda **o: open_list(store, balance=True, **o),
        "planned mixture": lambda **o: open_list(
            [(rows, 2), (rows[:40], 1)], stopping_strategy="all_exhausted", **o
        ),
        "in order": lambda **o: open_list(rows, strategy="concat", shuffle=False, **o),
        "sharded": lambda **o: open_stream(path, **o),
        "sharded in order": lambda **o: open_stream(path, shuffle=False, **o),
        "sharded mixture": lambda **o: open_stream(mixture, stopping_strategy="all_exhausted", **o),
        "generator": lambda **o: open_stream(lambda: iter(rows), shards=4, **o),
    }


def states_and_digests(tools, data):
    """The state before any pack and after each, as JSON, and the digest of each pack."""
    states, digests = [json.dumps(data.state_dict())], []
    for pack in data:
        digests.append(tools.digest(pack))
        states.append(json.dumps(data.state_dict()))
    return states, digests


@pytest.mark.parametrize("kills_each", [10, pytest.param(125, marks=pytest.mark.slow)])
def test_kills_anywhere_continue_with_the_identical_stream(kinds, tools, tmp_path, kills_each):
    """A1, on the core: a kill is a state read back from disk by a process that knows nothing."""
    rng, kills, lost = random.Random(0), 0, 0
    for make in kinds.values():
        states, digests = states_and_digests(tools, make(epochs=2))
        for _ in range(kills_each):
            cut = rng.randrange(len(states))
            if kills % 10 == 0:  # through a file, as in a run
                write_state(tmp_path / "state.json", json.loads(states[cut]))
                state = read_state(tmp_path / "state.json")
            else:
                state = json.loads(states[cut])
            again = make(epochs=2)
            again.load_state_dict(state)
            rest = [tools.digest(pack) for pack in again]
            lost += rest != digests[cut:]
            kills += 1
    print(f"{lost} of {kills} kills continued with another stream")
    assert lost == 0 and kills == kills_each * len(kinds)


@pytest.mark.smoke("resumed ≡ uninterrupted")
@pytest.mark.parametrize("kind", ["planned", "planned mixture", "sharded", "sharded mixture"])
def test_a_chain_of_resumes_crosses_epochs(kinds, tools, kind):
    """A2: ten in a row, save directly after load, load without iterating."""
    make = kinds[kind]
    _, digests = states_and_digests(tools, make(epochs=3))
    seen, state, piece = [], None, len(digests) // 10 + 1
    while True:
        data = make(epochs=3)
        if state is not None:
            data.load_state_dict(state)
            assert json.dumps(data.state_dict()) == json.dumps(state), "a load alone changed it"
            idle = make(epochs=3)
            idle.load_state_dict(data.state_dict())
            data = idle
        packs = list(itertools.islice(iter(data), piece))
        seen += [tools.digest(pack) for pack in packs]
        state = json.loads(json.dumps(data.state_dict()))
        if len(packs) < piece:
            break
    assert seen == digests and len(digests) > 9 * piece - 9


@pytest.mark.parametrize("kind", ["planned", pytest.param("sharded", marks=pytest.mark.slow)])
def test_all_72_changes_of_ranks_and_workers_continue_the_sequence(kinds, tools, kind):
    """A3, on the core: 9 topologies, all ordered pairs, 5 stops each, odd steps included."""

    shards = {"shards": 16} if kind == "sharded" else {}

    def make(rank=0, world_size=1):
        return kinds[kind](rank=rank, world_size=world_size, epochs=None, max_packs=48, **shards)

    alone = [tools.digest(pack) for pack in make()]
    wrong = cases = 0
    for before, after in itertools.permutations(TOPOLOGIES, 2):
        run = tools.Run(make, *before)
        packs, states = [], {}
        for number, pack in enumerate(run.packs(), 1):
            packs.append(tools.digest(pack))
            if number % before[0] == 0 and number // before[0] in (1, 2, 3, 5, 7):
                states[number] = run.saved()
        for stop, state in states.items():
            rest = [tools.digest(pack) for pack in tools.Run(make, *after).load(state).packs()]
            whole = packs[:stop] + rest
            wrong += whole[:48] != alone or any(content for _, content in whole[48:])
            cases += 1
    print(f"{kind}: {wrong} of {cases} changes of topology went wrong")
    assert wrong == 0 and cases == 360


@pytest.mark.parametrize("kind", ["planned", "sharded"])
def test_a_state_at_every_batch_loses_no_document(tools, jsonl, kind):
    """A4: at every pack the state restores the next pack; at some, all the rest."""
    rows = tools.documents(2_500, longest=60)
    path = None if kind == "planned" else jsonl(rows)

    def make():
        if path is None:
            return PackedDataset(rows, budget=512, pool=256)
        options = {"pool": 64, "shards": 2, "shuffle": 64, "pretokenize": False}
        return PackedDataset(path, budget=512, **options)

    states, digests = states_and_digests(tools, make())
    reader, wrong = make(), 0
    for cut, state in enumerate(states[:-1]):
        reader.load_state_dict(json.loads(state))
        wrong += tools.digest(next(iter(reader))) != digests[cut]
    print(f"{kind}: {wrong} of {len(states) - 1} save points continued with another pack")
    assert wrong == 0
    for cut in (1, len(states) // 3, len(states) - 2):
        reader.load_state_dict(json.loads(states[cut]))
        assert [tools.digest(pack) for pack in reader] == digests[cut:]


def test_a_resume_with_rows_left_out_continues_the_same(tools, jsonl):
    rows = [row.tolist() if i % 5 else [] for i, row in enumerate(tools.documents(120))]
    path = jsonl(rows)

    def make():
        return open_stream(path, shards=2, on_error="skip")

    states, digests = states_and_digests(tools, make())
    for cut in range(0, len(states), 3):
        data = make()
        data.load_state_dict(json.loads(states[cut]))
        assert [tools.digest(pack) for pack in data] == digests[cut:]


@pytest.mark.parametrize("before, after", [(1, 3), (3, 2), (None, 2), (1, None), (2, 2)])
@pytest.mark.parametrize("share", [0.4, 1])
def test_a_resume_may_change_the_number_of_epochs(kinds, tools, before, after, share):
    make = kinds["planned"]
    whole = [tools.digest(pack) for pack in make(epochs=4)]
    first, last = (sum(map(make().count, range(n or 4))) for n in (1, after))
    data, done = make(epochs=before), int(first * share)
    assert [tools.digest(p) for p in itertools.islice(iter(data), done)] == whole[:done]
    state = json.loads(json.dumps(data.state_dict()))
    again = make(epochs=after)
    again.load_state_dict(state)
    rest = itertools.islice(iter(again), len(whole) - done if after is None else None)
    assert [tools.digest(pack) for pack in rest] == whole[done:last]


def test_more_epochs_follow_the_pass_that_was_under_way(kinds, tools):
    """The second pass of one epoch each, continued as one of three: the epochs 1, 2 and 3."""
    make = kinds["planned"]
    whole = [tools.digest(pack) for pack in make(epochs=4)]
    first, data = make().count(0), make(epochs=1)
    assert [tools.digest(pack) for pack in data] == whole[:first]
    next(iter(data))
    again = make(epochs=3)
    again.load_state_dict(json.loads(json.dumps(data.state_dict())))
    seen = [content for _, content in map(tools.digest, again)]
    assert seen == [content for _, content in whole[first + 1 :]]


@pytest.mark.parametrize(("world_size", "workers"), [(1, 1), (2, 1), (2, 2), (4, 1)])
def test_a_run_of_ranks_that_is_resumed_twice_gives_what_one_leg_would(
    world_size, workers, tools, jsonl
):
    path = jsonl(tools.documents(200, longest=60))

    def make(**share):
        options = {"budget": 64, "pool": 8, "shuffle": 16, "pretokenize": False, "shards": 4}
        return PackedDataset(path, **options, max_packs=40, **share)

    found, state = [], None
    for steps in (4, 5, None):
        run = tools.Run(make, world_size, workers)
        run = run if state is None else run.load(state)
        count = None if steps is None else steps * world_size
        found += [tools.digest(pack) for pack in itertools.islice(run.packs(), count)]
        state = run.saved()
    assert found == [tools.digest(pack) for pack in tools.Run(make, 1).packs()]
