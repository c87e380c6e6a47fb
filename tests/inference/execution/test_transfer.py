"""Pinned buffers that kernels use: none is used again before its step is done; no GPU needed."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from nopad.inference.execution.transfer import StepBuffers, pack_arrays, unpack_views

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


class Event:
    """An event that counts; as in CUDA, one that was never recorded is done."""

    def __init__(self):
        self.num_recorded = self.num_waited = 0

    def record(self) -> None:
        self.num_recorded += 1

    def synchronize(self) -> None:
        self.num_waited += 1


@pytest.fixture
def events(monkeypatch) -> list[Event]:
    """The events of buffers that believe in a GPU."""
    made: list[Event] = []

    def event() -> Event:
        made.append(Event())
        return made[-1]

    def unpinned(function):
        return lambda *args, pin_memory=False, **kwargs: function(*args, **kwargs)

    monkeypatch.setattr(torch.cuda, "Event", event)
    for name in ("zeros", "empty"):
        monkeypatch.setattr(torch, name, unpinned(getattr(torch, name)))
    return made


def run_step(buffers: StepBuffers, first: int):
    """A step whose tokens count up from `first`."""
    slot = buffers.next_slot()
    arrays = [np.arange(first, first + 3, dtype=np.int32), np.full((2, 2), first)]
    packed = buffers.pack(slot, arrays)
    want, offsets = pack_arrays(arrays, pinned=False)
    assert len(packed) == len(want)
    for view, array in zip(unpack_views(packed, arrays, offsets), arrays, strict=True):
        assert view.tolist() == array.tolist()
    buffers.tokens[slot] = torch.arange(first, first + 4)
    return buffers.launched(slot)


def test_a_slot_is_used_again_once_its_step_is_done(events):
    buffers = StepBuffers(CUDA, 4)
    read = [run_step(buffers, 10 * i) for i in range(4)]
    assert [e.num_recorded for e in events] == [1, 1, 1, 1]
    waited = [e.num_waited for e in events]
    assert read[3](2).tolist() == [30, 31] and events[3].num_waited == waited[3] + 1
    run_step(buffers, 40)
    assert events[0].num_waited == waited[0] + 1 and events[0].num_recorded == 2
    assert read[1](4).tolist() == [10, 11, 12, 13]  # the second step still has its slot


def test_tokens_of_another_step_are_never_read():
    buffers = StepBuffers(CPU, 4)
    read = run_step(buffers, 0)
    for i in range(1, 4):
        run_step(buffers, i)
    kept = read(4)
    run_step(buffers, 90)
    assert kept.tolist() == [0, 1, 2, 3]  # a copy
    with pytest.raises(AssertionError, match="another step"):
        read(4)


@pytest.mark.parametrize("broken", [False, True])
def test_memory_goes_back_once_the_last_steps_are_done(events, broken, capsys):
    buffers = StepBuffers(CUDA, 4)
    run_step(buffers, 0)

    def fail() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    if broken:  # raised where it happened, not again here
        events[0].synchronize = fail
    before = events[1].num_waited
    del buffers
    gc.collect()
    assert events[1].num_waited == before + (not broken)
    assert "device-side" not in capsys.readouterr().err
