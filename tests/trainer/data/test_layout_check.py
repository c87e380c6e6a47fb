"""Ranks that read other packs than their layout says are told before the first step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import simulated
import tiny_run
from nopad.runtime import Axis, Layout
from nopad.trainer.data import PackedLoader, layout_check
from nopad.trainer.data.layout_check import FirstStep, find_fault

RIGHT = [FirstStep(rank // 2, rank // 2, 2, rank // 2, "ab"[rank // 2]) for rank in range(4)]
"""Four ranks, two replicas."""


def test_replicas_that_read_the_same_batches_pass():
    assert find_fault(RIGHT) is None
    assert find_fault([replace(step, replica=rank) for rank, step in enumerate(RIGHT)]) is None
    assert find_fault([replace(step, digest="a") for step in RIGHT]) is None  # equal packs


def test_ranks_of_one_replica_with_other_batches_are_named():
    other = [*RIGHT[:3], replace(RIGHT[3], digest="c", pack=3)]
    assert "ranks 2 and 3 train one replica" in (find_fault(other) or "")
    assert "(packs 1 and 3)" in (find_fault(other) or "")
    told = [*RIGHT[:3], replace(RIGHT[3], data_rank=0)]
    assert "ranks 2 and 3 train one replica" in (find_fault(told) or "")
    apart = [replace(step, replica=rank) for rank, step in enumerate(other)]
    assert "same data-parallel rank 1, but read different" in (find_fault(apart) or "")


def test_packs_that_nobody_reads_are_noticed():
    same = [FirstStep(rank, 0, 2, 0, "a") for rank in range(2)]
    assert "data-parallel ranks are [0] of 2" in (find_fault(same) or "")
    uneven = [FirstStep(rank, int(rank > 0), 2, rank, "ab"[rank > 0]) for rank in range(3)]
    assert "read by more ranks than others" in (find_fault(uneven) or "")


def test_the_first_step_is_compared_once(monkeypatch):
    gathered = []

    def gather(own):
        gathered.append(own)
        return [own, replace(own, digest="other") if len(gathered) == 1 else own]

    monkeypatch.setattr(layout_check, "gather_objects", gather)
    monkeypatch.setattr(PackedLoader, "_check_same_data", lambda self: None)
    layout = Layout(1, 2, sequence=Axis(1, 2))
    with simulated.ranks(2, rank=1):
        loader = PackedLoader(tiny_run.dataset(), layout=layout)
        with pytest.raises(ValueError, match="ranks 0 and 1 train one replica"):
            next(iter(loader))
        assert (gathered[0].replica, gathered[0].data_size, gathered[0].pack) == (0, 1, 0)
        assert len(list(loader)) > 2 and len(gathered) == 2
