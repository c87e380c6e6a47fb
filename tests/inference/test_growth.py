"""Nothing an engine keeps grows with the number of evaluations."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

import nopad.inference
import numpy as np
import pytest
from nopad.inference import Engine, SamplingParams
from nopad.inference.metrics.request_trace import RequestTrace
from nopad.inference.metrics.ring_buffer import RingBuffer
from nopad.inference.metrics.stats import Stats
from nopad.inference.requests.request import Request


def bytes_per_evaluation(engine: Engine, rounds: int) -> float:
    """Python memory that stays behind after each evaluation, in the best of three times `rounds`.

    A leak shows in all three; a dictionary that grows to its final size, in one.
    """
    params = SamplingParams(temperature=0.5, max_tokens=3, ignore_eos=True, stop=["zz"])

    def evaluate() -> None:
        engine.generate([[5, 6, 7]] * 3, params, deadline=1e6)
        engine.score([[5, 6, 7, 8]], [[[9, 10], [11]]])
        for event in engine.stream([[5, 6]], SamplingParams(temperature=0, max_tokens=2)):
            del event
        engine.add_request([3, 4], SamplingParams(temperature=0, max_tokens=2), deadline=1e6)
        while not any(e.completion for e in engine.step()):
            pass

    for _ in range(5):
        evaluate()
    tracemalloc.start()
    try:
        evaluate()
        marks = [held()]
        for _ in range(3):
            for _ in range(rounds):
                evaluate()
            marks.append(held())
        return min(np.diff(marks)) / rounds
    finally:
        tracemalloc.stop()


def held() -> int:
    """Bytes alive that the engine's own code asked for; libraries may fill caches of their own."""
    gc.collect()
    ours = tracemalloc.Filter(True, str(Path(nopad.inference.__file__).parent / "*"))
    snapshot = tracemalloc.take_snapshot().filter_traces([ours])
    return sum(trace.size for trace in snapshot.traces)


class Bytes:
    """The least of a tokenizer: stop strings need one."""

    eos_token_id = bos_token_id = None

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": list(text.encode())}

    def decode(self, tokens, skip_special_tokens=True):
        return bytes(t % 90 + 32 for t in tokens).decode()


@pytest.mark.parametrize("rounds", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_evaluations_leave_nothing_behind(tiny, rounds):
    engine = Engine(tiny("llama"), Bytes(), page_size=16)
    assert bytes_per_evaluation(engine, rounds) < 100


@pytest.mark.parametrize("leak", ["trace", "steps"])
def test_a_leak_would_be_seen(tiny, monkeypatch, leak):
    kept = []
    if leak == "trace":
        monkeypatch.setattr(RequestTrace, "clear", lambda self: None)
    else:
        note = Stats.note_step
        monkeypatch.setattr(
            Stats, "note_step", lambda self, now, *a: (kept.append(now), note(self, now, *a))[1]
        )
    engine = Engine(tiny("llama"), Bytes(), page_size=16)
    assert bytes_per_evaluation(engine, rounds=2) > 100


def test_a_window_holds_the_newest_rows_in_order():
    window = RingBuffer(2, limit=5)
    rows = np.arange(34.0).reshape(17, 2)
    for start, stop in ((0, 3), (3, 4), (4, 9), (9, 9), (9, 17)):
        window.add(rows[start:stop])
        assert window.rows().tolist() == rows[max(0, stop - 5) : stop].tolist()
        assert len(window) == min(stop, 5)


def test_figures_of_a_reset_start_at_zero_and_idle_time_does_not_count(tiny):
    engine = Engine(tiny("llama"), page_size=16, memory=4 * 16 * 2 * 2 * 2 * 8 * 4)
    long = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    engine.generate([[5 + i] * 14 for i in range(4)], long)
    seconds, preemptions = engine.stats.step_seconds, engine.stats.preemptions
    assert preemptions > 0
    engine.stats.reset()
    engine.generate([[5] * 4], long)
    assert engine.stats.preemptions == 0 and engine.stats.new_tokens == 30
    assert 0 < engine.stats.step_seconds < seconds


@pytest.mark.parametrize("depth", [0, 1])
def test_every_step_counts_whole_and_nothing_between_them(world, depth, monkeypatch):
    w = world(16, 16, depth=depth)
    launch, waits = w.runner.launch, []

    def slow(step):
        w.time += 2
        read = launch(step)

        def reading():
            waits.append(4)
            w.time += 4
            return read()

        return reading

    monkeypatch.setattr(w.runner, "launch", slow)
    params = SamplingParams(temperature=0, max_tokens=5)
    w.scheduler.add(Request(id=0, prompt=np.arange(3), limit=8, params=params))
    w.drain(bound=20)
    assert len(waits) == 5 and w.stats.step_seconds == 5 * (2 + 4)
