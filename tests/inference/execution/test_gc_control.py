"""Garbage collection is deferred, and afterwards its settings are the caller's again."""

from __future__ import annotations

import gc

import pytest
from nopad.inference import Engine, SamplingParams
from nopad.inference.execution.gc_control import defer_full_gc, gc_disabled
from nopad.inference.requests.output_processor import RequestGroup


@pytest.fixture
def collected():
    """The generations collected meanwhile; full collections are made frequent."""
    seen = []
    gc.freeze()
    gc.collect()  # Python skips a full one until 25 % more objects survive than after the last

    def note(phase, info):
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    before = gc.get_threshold()
    gc.set_threshold(50, 2, 2)
    yield seen
    gc.set_threshold(*before)
    gc.callbacks.remove(note)


def fill() -> None:
    kept = [[[i]] for i in range(20000)]
    assert len(kept) == 20000


def test_full_collections_wait_and_young_ones_go_on(collected):
    with pytest.raises(KeyError), defer_full_gc():
        fill()
        raise KeyError
    assert collected and 2 not in collected and gc.get_threshold() == (50, 2, 2)
    fill()
    assert 2 in collected


def test_blocks_that_overlap_leave_what_was_set_before_the_first(collected):
    first, second = defer_full_gc(), defer_full_gc()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    fill()
    assert 2 not in collected
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (50, 2, 2)


@pytest.mark.parametrize("enabled", [True, False])
def test_none_runs_inside_a_capture(collected, enabled):
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(KeyError), gc_disabled():
            collected.clear()
            fill()
            assert not collected
            raise KeyError
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_a_call_has_no_full_collection(tiny, collected, monkeypatch):
    engine = Engine(tiny("llama"))
    engine.generate([[5]], SamplingParams(max_tokens=1))
    seen = []

    def filling(real):
        def call(*args):
            collected.clear()
            fill()
            seen.extend(collected)
            return real(*args)

        return call

    monkeypatch.setattr(engine._loop, "step", filling(engine._loop.step))
    monkeypatch.setattr(RequestGroup, "result", filling(RequestGroup.result))
    engine.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert {0, 1} == set(seen) and gc.get_threshold() == (50, 2, 2)
