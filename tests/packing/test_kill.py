"""Real processes killed with SIGKILL at any moment: state and batch in one record, nothing lost.

A child trains: it takes packs from a DataLoader, "steps" each, and saves the digest and the state
in one atomic record. The parent kills it at a random time, starts the next child from what is on
disk, and at the end compares the ordered records with an undisturbed run. Children are forked, so
that a start costs milliseconds; exit codes are read.
"""

import json
import multiprocessing
import random
import signal
import time

import pytest
from nopad.packing import PackedDataset
from nopad.packing.state import merge_states, read_state, write_state
from nopad.packing.state.run_state import VERSION
from torch.utils.data import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore")
PACKS = 160


def open_data(folder, kind, rank, world_size):
    options = {
        "budget": 64,
        "pool": 8,
        "seed": 3,
        "rank": rank,
        "world_size": world_size,
        "max_packs": PACKS,
    }
    if kind == "sharded":
        options |= {"pretokenize": False, "shuffle": 8}
    return PackedDataset(folder / "rows.jsonl", epochs=None, **options)


def train(folder, kind, workers, rank, world_size, digest, pause=None):
    """Train in a child: step, and save the packs seen with the state, atomically."""
    data, record = open_data(folder, kind, rank, world_size), folder / f"record{rank}.json"
    done = {"state": None, "digests": []}
    if record.exists():
        done = read_state(record)
        if done["state"] is not None:
            data.load_state_dict(done["state"])
    for pack in DataLoader(data, batch_size=None, num_workers=workers):
        done["digests"].append(list(digest(pack)))
        done["state"] = data.state_after(pack)
        write_state(record, done)
        # Ranks that step together are killed after the same step, with packs read ahead.
        time.sleep(600 if len(done["digests"]) == pause else 0.001)


@pytest.fixture
def folder(tools, jsonl):
    return jsonl(tools.documents(300)).parent


@pytest.fixture
def start(folder, tools):
    """Return a function that starts a child."""
    context = multiprocessing.get_context("fork")

    def run(kind, workers, rank, world_size, pause=None):
        arguments = (folder, kind, workers, rank, world_size, tools.digest, pause)
        child = context.Process(target=train, args=arguments)
        child.start()
        return child

    return run


def finish(child):
    child.join(timeout=300)
    assert child.exitcode == 0, f"the child ended with {child.exitcode}"


def seen(folder, rank):
    return read_state(folder / f"record{rank}.json")["digests"]


def undisturbed(folder, kind, tools):
    return [list(tools.digest(pack)) for pack in open_data(folder, kind, 0, 1)]


def check(folder, start, tools, kind, workers, world_size, kills):
    alone, rng, killed = (
        undisturbed(folder, kind, tools),
        random.Random(workers + 10 * world_size),
        0,
    )
    for rank in range(world_size):
        for _ in range(kills):
            child = start(kind, workers, rank, world_size)
            time.sleep(rng.uniform(0.0, 1.2 / kills + 0.1))
            child.kill()
            child.join()
            killed += child.exitcode == -signal.SIGKILL
        finish(start(kind, workers, rank, world_size))
    steps = zip(*(seen(folder, rank) for rank in range(world_size)), strict=True)
    together = [pack for step in steps for pack in step]
    differ = sum(a != b for a, b in zip(together, alone, strict=True))
    print(
        f"{kind}, {workers} workers, {world_size} ranks: {killed} kills, {differ} of {PACKS} differ"
    )
    assert together == alone and killed > 0


@pytest.mark.parametrize(
    "kind, workers, world_size", [("planned", 0, 2), ("sharded", 2, 1), ("sharded", 0, 2)]
)
def test_a_killed_process_continues_with_the_identical_stream(
    folder, start, tools, kind, workers, world_size
):
    check(folder, start, tools, kind, workers, world_size, kills=4)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["planned", "sharded"])
@pytest.mark.parametrize("workers", [0, 1, 2, 4])
@pytest.mark.parametrize("world_size", [1, 2])
def test_twenty_kills_in_every_topology(folder, start, tools, kind, workers, world_size):
    check(folder, start, tools, kind, workers, world_size, kills=20)


# (workers, ranks) before and after
PAIRS = [((2, 1), (4, 1)), ((0, 2), (1, 1)), ((4, 1), (0, 2)), ((1, 1), (1, 4)), ((1, 4), (1, 2)),
         ((2, 2), (0, 1))]  # fmt: skip


def change(folder, start, tools, kind, before, after, steps=17):
    """Train some steps under one topology, kill it, and train the rest under another."""
    alone = undisturbed(folder, kind, tools)
    for rank in range(before[1]):
        child = start(kind, before[0], rank, before[1], pause=steps)
        while not (folder / f"record{rank}.json").exists() or len(seen(folder, rank)) < steps:
            assert child.exitcode is None, "the child ended by itself"
            time.sleep(0.002)
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL
    records = [read_state(folder / f"record{rank}.json") for rank in range(before[1])]
    head = [pack for step in zip(*(r["digests"] for r in records), strict=True) for pack in step]
    state = merge_states([record["state"] for record in records])
    for rank in range(after[1]):
        write_state(folder / f"record{rank}.json", {"state": state, "digests": []})
        finish(start(kind, after[0], rank, after[1]))
    rest = sorted(pack for rank in range(after[1]) for pack in seen(folder, rank))
    assert head + [pack for pack in rest if pack[0] < PACKS] == alone
    return len(head)


@pytest.mark.parametrize("kind, pair", [("sharded", PAIRS[0]), ("planned", PAIRS[3])])
def test_another_topology_continues_a_killed_run(folder, start, tools, kind, pair):
    assert change(folder, start, tools, kind, *pair) < PACKS


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["planned", "sharded"])
@pytest.mark.parametrize("pair", PAIRS)
def test_six_changes_of_topology_continue_a_killed_run(folder, start, tools, kind, pair):
    assert change(folder, start, tools, kind, *pair) < PACKS


def test_the_record_on_disk_is_plain_json(folder, start):
    finish(start("planned", 0, 0, 1))
    text = (folder / "record0.json").read_text()
    assert json.loads(text)["state"]["state"]["version"] == VERSION
