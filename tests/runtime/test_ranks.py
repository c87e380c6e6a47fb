"""Rank and world size of a process, and joining or leaving a process group."""

import torch.distributed as dist
from nopad.runtime import destroy_group, init_group, rank, world_size


def test_a_process_without_a_group_is_rank_zero_of_one(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert (rank(), world_size()) == (0, 1)
    init_group()
    assert not dist.is_initialized()
    destroy_group()


def test_a_group_of_one_is_left_cleanly(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert (rank(), world_size()) == (0, 1)
    destroy_group()
    assert not dist.is_initialized()


def test_the_launchers_world_size_decides_whether_to_join(monkeypatch):
    joined = []
    monkeypatch.setattr(dist, "init_process_group", joined.append)
    for size in ("1", "2"):
        monkeypatch.setenv("WORLD_SIZE", size)
        init_group()
    assert joined == ["gloo"]
