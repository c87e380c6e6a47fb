"""Ranks and DataLoader workers are views of one sequence of packs, however they were started."""

import copy
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
from nopad.packing import PackedDataset
from torch.utils.data import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore")
KINDS = ("planned", "leveled", "sharded", "mixed")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 1, 2, 4])
def test_a_plain_loader_gives_the_same_packs_for_any_number_of_workers(make, tools, kind, workers):
    expected = tools.full(make(kind, epochs=2))
    loader = DataLoader(make(kind, epochs=2), batch_size=None, num_workers=workers)
    assert tools.full(loader) == expected and len(expected) > 50


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size, workers", [(2, 1), (4, 1), (2, 2), (8, 1), (1, 8), (2, 4)])
def test_ranks_and_workers_are_views_of_one_sequence(make, tools, kind, world_size, workers):
    def build(rank=0, world_size=1):
        return make(kind, rank, world_size, epochs=None, max_packs=100)

    alone = [tools.digest(pack) for pack in build()]
    together = [tools.digest(pack) for pack in tools.Run(build, world_size, workers).packs()]
    assert together[:100] == alone and len(alone) == 100
    assert all(not content for _, content in together[100:])


@pytest.mark.parametrize("world_size", [3, 5, 7])
def test_with_known_lengths_any_number_of_ranks_sees_equally_many_packs(make, tools, world_size):
    alone = [tools.digest(pack) for pack in make("planned", epochs=2)]
    run = tools.Run(
        lambda rank, world_size: make("planned", rank, world_size, epochs=2), world_size, 2
    )
    together = [tools.digest(pack) for pack in run.packs()]
    assert together[: len(alone)] == alone and len(together) % world_size == 0
    assert all(not content for _, content in together[len(alone) :])


@pytest.mark.parametrize("start", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
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
def test_ranks_known_by_the_environment_share_the_packs(tmp_path, start):
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
    with pytest.raises(
        ValueError, match="3 x 1 = 3 readers do not divide 8 shards: use 1, 2, 4 or 8 readers"
    ):
        next(iter(make("sharded", 0, 3, epochs=None)))


def test_ranks_of_a_stream_must_be_told_how_long_the_run_is(make):
    with pytest.raises(ValueError, match="max_packs="):
        next(iter(make("sharded", 0, 2, epochs=1)))
