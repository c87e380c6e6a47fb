"""PackedDataset: one sequence of packs, whoever reads it, through every kind of loader."""

import copy
import json
import os
import pickle
import subprocess
import sys
import textwrap
from itertools import islice

import numpy as np
import pytest
import torch
from nopad.packing import PackedDataset, Sample
from nopad.packing.sources.token_store import TokenArray, TokenStore
from nopad.packing.state import merge_states
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

pytestmark = pytest.mark.filterwarnings("ignore")
KINDS = ("planned", "levelled", "sharded", "mixed")


@pytest.fixture
def make(tools, jsonl):
    """Give a function that opens a dataset of each kind for one rank."""
    rows = tools.documents(400)
    path = jsonl(rows)
    other = jsonl(tools.documents(150, seed=1), "other.jsonl")

    def open_one(kind, rank=0, world=1, **options):
        options = {"budget": 128, "pool": 24, "rank": rank, "world": world, **options}
        if kind in ("planned", "levelled"):
            return PackedDataset(rows, level=kind == "levelled", **options)
        options = {"shards": 8, "shuffle": 16, "ahead": False, **options}
        if kind == "mixed":
            return PackedDataset([(path, 2), (other, 1)], stop="all", **options)
        return PackedDataset(path, **options)

    return open_one


def full(tools, packs):
    return [tools.digest(pack) for pack in packs if len(pack.tokens)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 1, 2, 4])
def test_a_plain_loader_gives_the_same_packs_for_any_number_of_workers(make, tools, kind, workers):
    expected = full(tools, make(kind, epochs=2))
    loader = DataLoader(make(kind, epochs=2), batch_size=None, num_workers=workers)
    assert full(tools, loader) == expected and len(expected) > 50


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world, workers", [(2, 1), (4, 1), (2, 2), (8, 1), (1, 8), (2, 4)])
def test_ranks_and_workers_are_views_of_one_sequence(make, tools, kind, world, workers):
    def build(rank=0, world=1):
        return make(kind, rank, world, epochs=None, packs=100)

    alone = [tools.digest(pack) for pack in build()]
    together = [tools.digest(pack) for pack in tools.Run(build, world, workers).packs()]
    assert together[:100] == alone and len(alone) == 100
    assert all(not content for _, content in together[100:])


@pytest.mark.parametrize("world", [3, 5, 7])
def test_with_known_lengths_any_number_of_ranks_sees_equally_many_packs(make, tools, world):
    alone = [tools.digest(pack) for pack in make("planned", epochs=2)]
    run = tools.Run(lambda rank, world: make("planned", rank, world, epochs=2), world, 2)
    together = [tools.digest(pack) for pack in run.packs()]
    assert together[: len(alone)] == alone and len(together) % world == 0
    assert all(not content for _, content in together[len(alone) :])


@pytest.mark.parametrize("start", ["fork", "forkserver"])
def test_workers_read_for_their_parents_rank_however_they_were_started(monkeypatch, start):
    data = PackedDataset([[n + 1] * 4 for n in range(8)], budget=4, shuffle=False)
    for name, value in (("is_initialized", True), ("get_rank", 1), ("get_world_size", 2)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    loader = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context=start)
    assert [pack.index for pack in loader] == [1, 3, 5, 7]


def test_a_dataset_that_was_sent_to_another_rank_reads_for_that_one(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    data = PackedDataset([[n + 1] * 4 for n in range(4)], budget=4, shuffle=False)
    sent = pickle.dumps(data)
    monkeypatch.setenv("RANK", "1")
    assert [pack.index for pack in pickle.loads(sent)] == [1, 3]


def test_forked_workers_of_a_copy_read_for_the_rank_that_iterates(monkeypatch):
    data = PackedDataset([[n + 1] * 4 for n in range(4)], budget=4, shuffle=False)
    copies = [copy.deepcopy(data), pickle.loads(pickle.dumps(data))]
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    for one in copies:
        loader = DataLoader(one, batch_size=None, num_workers=1, multiprocessing_context="fork")
        assert [pack.index for pack in loader] == [1, 3]


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_spawned_ranks_that_know_themselves_by_the_environment_share_the_packs(tmp_path, start):
    script = tmp_path / "ranks.py"
    script.write_text(
        textwrap.dedent("""
        import os, sys
        import torch.multiprocessing as mp
        from nopad.packing import PackedDataset
        from torch.utils.data import DataLoader

        def main(rank, data, start):
            os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), "2"
            loader = DataLoader(data, None, num_workers=1, multiprocessing_context=start)
            print(f"{rank}: {[pack.index for pack in loader]}", flush=True)

        if __name__ == "__main__":
            data = PackedDataset([[n + 1] * 4 for n in range(8)], budget=4, shuffle=False)
            mp.spawn(main, (data, sys.argv[1]), nprocs=2)
        """)
    )
    ran = subprocess.run(
        [sys.executable, script, start], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    assert sorted(ran.stdout.splitlines()) == ["0: [0, 2, 4, 6]", "1: [1, 3, 5, 7]"]


def test_readers_that_do_not_divide_the_shards_are_told_what_does(make):
    with pytest.raises(ValueError, match="= 3 readers do not divide 8 shards: use 2 or 4 readers"):
        next(iter(make("sharded", 0, 3, epochs=None)))


def test_ranks_of_a_stream_must_be_told_how_long_the_run_is(make):
    with pytest.raises(ValueError, match="packs="):
        next(iter(make("sharded", 0, 2, epochs=1)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_loader_resumes_exactly(make, tools, kind, workers):
    def loader():
        data = make(kind, 1, 2, epochs=None, packs=120)
        return StatefulDataLoader(data, batch_size=None, num_workers=workers)

    whole = [tools.digest(pack) for pack in loader()]
    for cut in (0, 1, 6, 33, len(whole) - 1):
        first = loader()
        packs = iter(first)
        head = [tools.digest(next(packs)) for _ in range(cut)]
        state = first.state_dict()
        del packs
        second = loader()
        second.load_state_dict(state)
        assert head + [tools.digest(pack) for pack in second] == whole


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_loader_prefetched_is_not_counted_as_seen(make, tools, kind):
    whole = full(tools, make(kind))
    data = make(kind)
    loader = iter(DataLoader(data, batch_size=None, num_workers=2, prefetch_factor=8))
    head = []
    for _ in range(5):
        pack = next(loader)
        head.append(tools.digest(pack))
        data.stepped(pack)
    state = json.loads(json.dumps(data.state_dict()))
    del loader
    again = make(kind)
    again.load_state_dict(state)
    tail = full(tools, DataLoader(again, batch_size=None, num_workers=1))
    assert head + tail == whole


def test_a_stream_refuses_a_step_that_leaves_a_pack_out(make):
    data = make("sharded")
    packs = iter(data)
    next(packs)
    with pytest.raises(ValueError, match="pack 1 was stepped where pack 0 comes next"):
        data.stepped(next(packs))


def test_a_pass_follows_a_pass_with_the_next_epochs_order(make, tools):
    data = make("planned")
    first, second = full(tools, data), full(tools, data)
    assert first != second
    data.set_epoch(0)
    assert full(tools, data) == first
    data.set_epoch(1)
    assert full(tools, data) == second


def test_through_workers_set_epoch_moves_on_and_without_it_the_order_repeats(make, tools):
    plain = make("planned")
    orders = [full(tools, plain) for _ in range(2)]
    data = make("planned")
    loader = DataLoader(data, batch_size=None, num_workers=1)
    assert [full(tools, loader) for _ in range(2)] == [orders[0], orders[0]]
    data.set_epoch(1)
    assert full(tools, loader) == orders[1]


@pytest.mark.parametrize("kind", ["planned", "sharded"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_pass_that_packs_ended_is_followed_by_another_order(make, tools, kind, world):
    def passes(rank):
        data = make(kind, rank, world, epochs=None, packs=16)
        return [[tools.digest(pack) for pack in data] for _ in range(3)]

    ranks = [passes(rank) for rank in range(world)]
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
@pytest.mark.parametrize("packs", [1, 11, 12, 16])
@pytest.mark.parametrize("world, workers", [(1, 2), (2, 1), (2, 2)])
def test_all_readers_begin_the_next_pass_with_the_same_epoch(tools, kind, packs, world, workers):
    def build(rank=0, world=1):
        rows = [[n + 1] * 8 for n in range(5 if kind == "planned" else 40)]
        options = {} if kind == "planned" else {"shards": 4, "ahead": False}
        options |= {"rank": rank, "world": world, "epochs": None, "packs": packs}
        return PackedDataset(rows, budget=8, **options)

    def passes(rank, world, workers):
        loader = DataLoader(
            build(rank, world),
            batch_size=None,
            num_workers=workers,
            persistent_workers=workers > 0,
            multiprocessing_context="fork" if workers else None,
        )
        return [[tools.digest(pack) for pack in loader] for _ in range(3)]

    alone = passes(0, 1, 0)
    ranks = [passes(rank, world, workers) for rank in range(world)]
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
    assert head + full(tools, again) == full(tools, make("planned"))


def test_the_packs_of_an_epoch_are_counted_without_reading_tokens(make):
    assert make("planned").count() == len(list(make("planned")))
    with pytest.raises(ValueError, match=r"cannot be counted .* ahead=True .* estimate\(\)"):
        make("sharded").count()
    assert make("sharded", ahead=True).count() > 0


def test_the_packs_of_a_stream_are_estimated_from_its_first_rows(make):
    exact = len([pack for pack in make("sharded") if len(pack.tokens)])
    assert abs(make("sharded").estimate() - exact) < 0.3 * exact
    assert make("planned").estimate() == make("planned").count()
    endless = PackedDataset(lambda: iter([[1]]), budget=8)
    assert endless.estimate() is None


def test_set_epoch_after_the_end_repeats_an_epoch_and_leaves_an_endless_run_alone(make, tools):
    data = make("planned")
    first = full(tools, data)
    data.set_epoch(0)
    assert full(tools, data) == first
    endless = make("planned", epochs=None)
    packs = iter(endless)
    head = [tools.digest(next(packs)) for _ in range(120)]
    state = endless.state_dict()
    assert state["position"]["epoch"] > 0
    again = make("planned", epochs=None)
    again.load_state_dict(state)
    again.set_epoch(0)
    assert tools.digest(next(iter(again))) == tools.digest(next(packs)) != head[0]


def test_every_document_is_in_an_epoch_exactly_once(make, tools):
    rows = sorted(row.tolist() for row in tools.documents(400))
    for kind in ("planned", "sharded"):
        found = []
        for pack in make(kind):
            parts = np.split(pack.tokens, pack.cu_seqlens[1:-1])
            found += [part.tolist() for part in parts if len(part)]
        assert sorted(found) == rows


def test_states_of_ranks_at_different_places_are_not_merged():
    states = [{"position": {"index": i}, "shards": {str(i): {}}} for i in (4, 8)]
    with pytest.raises(ValueError, match="different places"):
        merge_states(states)


def test_places_of_one_shard_that_contradict_each_other_are_not_merged():
    states = [{"position": {"index": 4}, "shards": {"1": {"made": made}}} for made in (4, 8)]
    with pytest.raises(ValueError, match="different places of shard 1"):
        merge_states(states)


@pytest.mark.parametrize(("world", "workers"), [(1, 1), (2, 1), (2, 2), (4, 1)])
def test_a_run_of_ranks_that_is_resumed_twice_gives_what_one_leg_would(
    world, workers, tools, jsonl
):
    path = jsonl(tools.documents(200, longest=60))

    def make(**share):
        options = {"budget": 64, "pool": 8, "shuffle": 16, "ahead": False, "shards": 4}
        return PackedDataset(path, **options, packs=40, **share)

    found, state = [], None
    for steps in (4, 5, None):
        run = tools.Run(make, world, workers)
        run = run if state is None else run.load(state)
        count = None if steps is None else steps * world
        found += [tools.digest(pack) for pack in islice(run.packs(), count)]
        state = run.saved()
    assert found == [tools.digest(pack) for pack in tools.Run(make, 1).packs()]


def test_importing_packing_does_not_import_torch():
    program = "import sys, nopad.packing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_accelerates_stateful_loader_resumes_exactly(tmp_path):
    program = textwrap.dedent(
        """
        import sys
        import numpy as np, torch
        from accelerate import Accelerator
        from accelerate.utils import DataLoaderConfiguration
        from nopad.packing import PackedDataset, Sample
        from torchdata.stateful_dataloader import StatefulDataLoader
        rows = [np.full(5 + i % 17, i) for i in range(200)]
        def batches(loader):
            for pack in loader:
                yield pack["tokens"].tolist()
        def build():
            config = DataLoaderConfiguration(use_stateful_dataloader=True, dispatch_batches=False)
            accelerator = Accelerator(cpu=True, dataloader_config=config)
            data = PackedDataset(rows, budget=64, pool=8)
            collate = lambda pack: {"tokens": torch.from_numpy(pack.tokens)}
            loader = StatefulDataLoader(data, batch_size=None, collate_fn=collate)
            return accelerator, accelerator.prepare_data_loader(loader)
        accelerator, loader = build()
        whole = list(batches(loader))
        accelerator, loader = build()
        packs = batches(loader)
        head = [next(packs) for _ in range(9)]
        state = loader.state_dict()
        accelerator, loader = build()
        loader.load_state_dict(state)
        assert head + list(batches(loader)) == whole, (len(head), len(whole))
        print("finished")
        """
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=env, timeout=300
    )
    assert child.returncode == 0, child.stderr[-2000:]
    assert child.stdout.strip().endswith("finished")


def test_a_tokenizer_may_know_a_few_letters_only():
    letters = {letter: number for number, letter in enumerate("abc")}
    data = PackedDataset(
        ["abc", "cab"], tokenizer=lambda text: [letters[x] for x in text], budget=8
    )
    assert sorted(next(iter(data)).tokens.tolist()) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        ([], {}),
        ([[1, 2, 3] * 9], {"overflow": "drop"}),
        ([[1.5, 2.0]], {"on_error": "skip"}),
    ],
    ids=["no rows", "all dropped", "all left out"],
)
@pytest.mark.parametrize("end", [{"epochs": 2}, {"epochs": 2, "packs": 5}, {"epochs": None}])
def test_a_stream_with_nothing_to_pack_is_refused_whether_or_not_it_has_an_end(rows, options, end):
    data = PackedDataset(lambda: iter(rows), budget=8, shards=2, **options, **end)
    with pytest.raises(ValueError, match="nothing to pack"):
        list(data)


def test_a_shard_without_rows_is_refused_where_there_is_no_end():
    data = PackedDataset(lambda: iter([[1, 2, 3]]), budget=8, shards=2, epochs=None, pool=1)
    with pytest.raises(ValueError, match="shard 1 of 2 has nothing to pack"):
        list(data)
    data = PackedDataset(lambda: iter([[1, 2, 3]]), budget=8, shards=2, pool=1)
    assert [pack.tokens.tolist() for pack in data] == [[1, 2, 3]]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"rank": 1}, "rank 1 and world None go together"),
        ({"world": 2}, "rank None and world 2 go together"),
        ({"shards": 0}, "shards 0: at least 1"),
        ({"shuffle": -1}, "shuffle=-1: True, False, or how many rows"),
        ({"shuffle": 2.5}, "shuffle=2.5: True"),
        ({"shuffle": None}, "shuffle=None: True"),
        ({"pad": -5}, "pad=-5: fill packs up with an id"),
        ({"pad": 10, "vocab_size": 10}, "pad=10: fill .* from 0 to 9"),
        ({"vocab_size": 0}, "vocab_size 0: at least 1"),
        ({"vocab_size": "10"}, "vocab_size '10' must be a whole number"),
        ({"budget": 8.0}, "budget 8.0 must be a whole number"),
        ({"pool": 1.5}, "pool 1.5 must be a whole number"),
        ({"seed": None}, "seed None must be a whole number"),
        ({"epochs": 1.5}, "epochs 1.5 must be a whole number"),
        ({"packs": 2.5}, "packs 2.5 must be a whole number"),
        ({"shards": 2.0}, "shards 2.0 must be a whole number"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(options, told):
    with pytest.raises(ValueError, match=told):
        list(islice(PackedDataset([[1, 2, 3]], **{"budget": 8, **options}), 9))


def test_settings_of_numpy_are_the_same_settings(tools):
    rows = tools.documents(60)
    own = PackedDataset(rows, budget=64, seed=3, pool=8)
    theirs = PackedDataset(rows, budget=np.int64(64), seed=np.int32(3), pool=np.uint8(8))
    assert [tools.digest(p) for p in theirs] == [tools.digest(p) for p in own]
    assert json.dumps(theirs.state_dict()) == json.dumps(own.state_dict())


@pytest.mark.parametrize("skip", ["raise", "skip"])
@pytest.mark.parametrize("kind", ["list", "file", "store", "stream of a list", "stream of a file"])
def test_a_document_that_is_too_long_is_named_by_its_own_place(jsonl, kind, skip):
    rows = [[1] * 3 for _ in range(50)]
    rows[37] = [1] * 100
    options = {"budget": 8, "overflow": "error", "on_error": skip}
    if "stream" in kind:
        options |= {"ahead": False, "shards": 2}
    source, place = rows, "list, row 37"
    if "file" in kind:
        source, place = jsonl(rows), "rows.jsonl, line 38"
    if kind == "store":
        samples = [Sample(np.array(row)) for row in rows]
        shelves = [TokenArray.of(samples[:30], "first"), TokenArray.of(samples[30:], "second")]
        source, place = TokenStore(shelves), "second, document 37"
    with pytest.raises(ValueError, match=f"{place} has 100 tokens, a pack holds 8: raise the"):
        list(PackedDataset(source, **options))
