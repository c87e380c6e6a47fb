"""Real processes killed with SIGKILL at any moment: state and batch in one record, nothing lost.

A child trains: it takes packs from a DataLoader, "steps" each, and saves the digest and the state
in one atomic record. The parent kills it at a random time, starts the next child from what is on
disk, and at the end compares the ordered records with an undisturbed run.
"""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time

import pytest

CHILD = textwrap.dedent(
    """
    import hashlib, json, sys, time, warnings
    from pathlib import Path
    warnings.filterwarnings("ignore")
    import torch
    torch.set_num_threads(1)
    from torch.utils.data import DataLoader
    from nopad.packing import PackedDataset
    from nopad.packing.state_file import read_state, write_state

    folder, kind, workers, rank, world = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:6])
    options = {"budget": 64, "pool": 8, "seed": 3, "rank": rank, "world": world, "packs": 160}
    if kind == "planned":
        rows = [json.loads(line)["input_ids"] for line in open(folder / "rows.jsonl")]
        data = PackedDataset(rows, epochs=None, **options)
    else:
        data = PackedDataset(folder / "rows.jsonl", epochs=None, ahead=False, shuffle=8, **options)
    record = folder / f"record{rank}.json"
    done = {"state": None, "digests": []}
    if record.exists():
        done = read_state(record)
        if done["state"] is not None:
            data.load_state_dict(done["state"])
    print("started", flush=True)
    for pack in DataLoader(data, batch_size=None, num_workers=workers):
        content = hashlib.sha256(pack.tokens.tobytes() + pack.cu_seqlens.tobytes()).hexdigest()[:12]
        done["digests"].append([pack.index, content if len(pack.tokens) else ""])
        done["state"] = data.state_after(pack)
        write_state(record, done)
        time.sleep(0.002)
    print("finished", flush=True)
    """
)


def start(folder, kind, workers, rank, world):
    command = [sys.executable, "-c", CHILD, str(folder), kind, *map(str, (workers, rank, world))]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)


def digests(folder, rank):
    from nopad.packing.state_file import read_state

    return read_state(folder / f"record{rank}.json")["digests"]


def survive(folder, kind, workers, world, kills, rng):
    """Run all ranks to the end, killing one of them `kills` times on the way."""
    killed = 0
    for rank in range(world):
        for attempt in range(kills + 50):
            child = start(folder, kind, workers, rank, world)
            if attempt < kills:
                child.stdout.readline()
                time.sleep(rng.uniform(0.0, 0.25))
                child.send_signal(signal.SIGKILL)
                child.communicate()
                killed += child.returncode == -signal.SIGKILL
                continue
            out, err = child.communicate(timeout=120)
            assert child.returncode == 0 and b"finished" in out, err.decode()[-2000:]
            break
    return killed


@pytest.fixture
def undisturbed(tools, jsonl, tmp_path):
    rows = tools.documents(300)
    jsonl(rows)

    def run(kind):
        folder = tmp_path / f"alone_{kind}"
        folder.mkdir()
        (folder / "rows.jsonl").write_bytes((tmp_path / "rows.jsonl").read_bytes())
        child = start(folder, kind, 0, 0, 1)
        out, err = child.communicate(timeout=120)
        assert child.returncode == 0 and b"finished" in out, err.decode()[-2000:]
        return digests(folder, 0)

    return run


def check(undisturbed, tmp_path, kind, workers, world, kills):
    alone = undisturbed(kind)
    rng = random.Random(workers * 10 + world)
    killed = survive(tmp_path, kind, workers, world, kills, rng)
    ranks = [digests(tmp_path, rank) for rank in range(world)]
    together = [pack for step in zip(*ranks, strict=True) for pack in step]
    print(
        f"{kind}, {workers} workers, {world} ranks: {killed} kills, "
        f"{sum(a != b for a, b in zip(together, alone, strict=True))} packs differ of {len(alone)}"
    )
    assert together == alone and killed > 0


@pytest.mark.parametrize("kind, workers, world", [("planned", 0, 2), ("sharded", 2, 1)])
def test_a_killed_process_continues_with_the_identical_stream(
    undisturbed, tmp_path, kind, workers, world
):
    check(undisturbed, tmp_path, kind, workers, world, kills=2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["planned", "sharded"])
@pytest.mark.parametrize("workers", [0, 1, 2, 4])
@pytest.mark.parametrize("world", [1, 2])
def test_twenty_kills_in_every_topology(undisturbed, tmp_path, kind, workers, world):
    check(undisturbed, tmp_path, kind, workers, world, kills=20)


PAIRS = [((2, 1), (4, 1)), ((1, 2), (1, 1)), ((4, 1), (0, 2)), ((1, 1), (1, 4)), ((1, 4), (1, 2)),
         ((2, 2), (1, 1))]  # fmt: skip


def change(undisturbed, tmp_path, kind, before, after, stop):
    """Train some steps under one topology, all ranks, and the rest under another."""
    from nopad.packing.state import merge_states
    from nopad.packing.state_file import read_state, write_state

    alone = undisturbed(kind)
    for rank in range(before[1]):
        child = start(tmp_path, kind, *before[:1], rank, before[1])
        while True:
            assert child.poll() is None, child.communicate()[1].decode()[-2000:]
            try:
                if len(digests(tmp_path, rank)) >= stop:
                    break
            except ValueError:
                pass
            time.sleep(0.005)
        child.kill()
        child.communicate()
    records = [read_state(tmp_path / f"record{rank}.json") for rank in range(before[1])]
    steps = min(len(record["digests"]) for record in records)
    if any(len(record["digests"]) != steps for record in records):
        pytest.skip("the ranks were killed at different steps, which a collective step forbids")
    head = [pack for step in zip(*(r["digests"] for r in records), strict=True) for pack in step]
    state = merge_states([record["state"] for record in records])
    for rank in range(after[1]):
        write_state(tmp_path / f"record{rank}.json", {"state": state, "digests": []})
        child = start(tmp_path, kind, *after[:1], rank, after[1])
        out, err = child.communicate(timeout=120)
        assert child.returncode == 0 and b"finished" in out, err.decode()[-2000:]
    tails = [sorted(digests(tmp_path, rank)) for rank in range(after[1])]
    rest = sorted(pack for tail in tails for pack in tail)
    assert head + [pack for pack in rest if pack[0] < 160] == alone


@pytest.mark.parametrize("before, after", PAIRS[:1])
def test_other_workers_continue_a_killed_run(undisturbed, tmp_path, before, after):
    change(undisturbed, tmp_path, "sharded", before, after, stop=17)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["planned", "sharded"])
@pytest.mark.parametrize("before, after", PAIRS)
def test_other_ranks_and_workers_continue_a_killed_run(undisturbed, tmp_path, kind, before, after):
    change(undisturbed, tmp_path, kind, before, after, stop=17)


def test_states_of_killed_ranks_are_json(undisturbed, tmp_path):
    undisturbed("planned")
    text = (tmp_path / "alone_planned" / "record0.json").read_text()
    assert json.loads(text)["state"]["state"]["version"] == 1
