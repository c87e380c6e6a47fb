"""Nothing an engine keeps grows with the number of evaluations."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

import nopad.inference
import numpy as np
import pytest
from fake_tokenizer import FakeTokenizer
from nopad.inference import Engine, SamplingParams
from nopad.inference.metrics.request_trace import RequestTrace
from nopad.inference.metrics.stats import Stats


def bytes_per_evaluation(engine: Engine, rounds: int) -> float:
    """Python memory left by each evaluation, in the best of three times `rounds`.

    A leak shows in all three, a dictionary that grows to its final size in one.
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
        marks = [traced_bytes()]
        for _ in range(3):
            for _ in range(rounds):
                evaluate()
            marks.append(traced_bytes())
        return min(np.diff(marks)) / rounds
    finally:
        tracemalloc.stop()


def traced_bytes() -> int:
    """Bytes alive that the engine's own code allocated; libraries may fill caches of their own."""
    gc.collect()
    ours = tracemalloc.Filter(True, str(Path(nopad.inference.__file__).parent / "*"))
    snapshot = tracemalloc.take_snapshot().filter_traces([ours])
    return sum(trace.size for trace in snapshot.traces)


@pytest.mark.parametrize("rounds", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_evaluations_leave_nothing_behind(tiny, rounds):
    engine = Engine(
        tiny("llama"), FakeTokenizer(to_byte=lambda token: token % 90 + 32), page_size=16
    )
    assert bytes_per_evaluation(engine, rounds) < 100


@pytest.mark.parametrize("leak", ["trace", pytest.param("steps", marks=pytest.mark.slow)])
def test_a_leak_would_be_seen(tiny, monkeypatch, leak):
    kept = []
    if leak == "trace":
        monkeypatch.setattr(RequestTrace, "clear", lambda self: None)
    else:
        note = Stats.record_step
        monkeypatch.setattr(
            Stats, "record_step", lambda self, now, *a: (kept.append(now), note(self, now, *a))[1]
        )
    engine = Engine(
        tiny("llama"), FakeTokenizer(to_byte=lambda token: token % 90 + 32), page_size=16
    )
    assert bytes_per_evaluation(engine, rounds=4) > 100
