"""Windows of a large epoch: planned one by one, in its order, resumed without the others."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest
from nopad.packing import PackedDataset
from nopad.packing.readers import planned

OPTIONS = {"budget": 64, "seed": 3, "epochs": 2, "cache_dir": False}


@pytest.fixture
def rows(tools):
    return [document.tolist() for document in tools.documents(150)]


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(planned, "WINDOW_DOCUMENTS", 40)


def test_every_document_of_a_window_is_packed_before_the_next(rows):
    data, order = PackedDataset(rows, **OPTIONS), []
    for pack in islice(data, data.count(0)):
        order += pack.samples.tolist()
    order = list(dict.fromkeys(order))  # without the later parts of split documents
    shuffled = np.concatenate(list(planned.epoch_order(150, 3, 0, True))).tolist()
    assert sorted(order) == list(range(150))
    for begin in range(0, 150, 40):
        assert set(order[begin : begin + 40]) == set(shuffled[begin : begin + 40])


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("balance", [False, True])
def test_a_resume_at_any_pack_continues_the_sequence(rows, tools, world_size, balance):
    options = {**OPTIONS, "balance": balance}
    wanted = tools.full(PackedDataset(rows, rank=0, world_size=1, **options))
    windows = set()
    for cut in range(1, len(wanted), 7):
        data = PackedDataset(rows, rank=0, world_size=world_size, **options)
        rounds = -(-cut // world_size)
        assert len(list(islice(data, rounds))) == rounds
        state = json.loads(json.dumps(data.state_dict()))
        windows.add(state["position"].get("window", 0))
        again = PackedDataset(rows, rank=0, world_size=1, **options)
        again.load_state_dict(state)
        assert tools.full(again) == wanted[rounds * world_size :]
    assert windows == {0, 1, 2, 3}


def test_a_resume_plans_its_own_window_and_those_after_it(rows, monkeypatch):
    data = PackedDataset(rows, **{**OPTIONS, "epochs": 1})
    packs = list(data)
    state, windows = data.state_dict(), []
    assert state["position"]["window"] == 3 and "window" not in data._start.position.to_json()
    stock = planned.PlannedPacks.window_plans

    def counted(self, epoch, window, *args):
        windows.append(window)
        return stock(self, epoch, window, *args)

    monkeypatch.setattr(planned.PlannedPacks, "window_plans", counted)
    state |= {"finished": False}
    state["position"] |= {"index": packs[-1].index}
    data.load_state_dict(state)
    assert [pack.index for pack in data] == [packs[-1].index] and windows == [3]


@pytest.mark.parametrize(
    "change, reason",
    [({"window": 4}, "in window 4, there are 4"), ({"window_start": 10**6}, "contradict each"),
     ({"window": -1}, "non-negative"), ({"window_start": None}, "non-negative")],
)  # fmt: skip
def test_a_window_that_does_not_exist_is_refused(rows, change, reason):
    data = PackedDataset(rows, **{**OPTIONS, "epochs": 1})
    list(data)
    state = data.state_dict()
    state |= {"finished": False, "position": {**state["position"], **change}}
    with pytest.raises(ValueError, match=reason):
        data.load_state_dict(state)
        list(data)


def test_windows_hardly_change_how_full_packs_are(rows, monkeypatch):
    fill = PackedDataset(rows, **OPTIONS).report()["fill"]
    monkeypatch.setattr(planned, "WINDOW_DOCUMENTS", 1 << 25)
    assert PackedDataset(rows, **OPTIONS).report()["fill"] - fill < 0.06
