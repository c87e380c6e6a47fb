"""A graph that does not fit the memory costs the graph, not the size of steps; no GPU needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nopad.inference import Engine, SamplingParams
from nopad.inference.graphs import DecodeGraphs, _recording

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def made(monkeypatch) -> DecodeGraphs:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    nothing: Any = None
    return DecodeGraphs(nothing, torch.zeros(65, dtype=torch.int64), room=1)


def test_a_graph_that_does_not_fit_leaves_the_steps_as_they_are(tiny, made, monkeypatch, caplog):
    tried = []

    def capture(arrays, forward):
        tried.append(1)
        raise torch.OutOfMemoryError("seeded")

    engine = Engine(tiny("llama"), page_size=16)
    want = [c.tokens for c in engine.generate([[5, 6], [7, 8, 9]], GREEDY)]
    assert engine._machine is not None
    monkeypatch.setattr(made, "_capture", capture)
    engine._machine.runner._graphs = made
    before = engine.tokens_per_step, engine.max_running
    got = [c.tokens for c in engine.generate([[5, 6], [7, 8, 9]], GREEDY)]
    assert got == want and (engine.tokens_per_step, engine.max_running) == before
    assert len(tried) == 1 and "without" in caplog.text
    assert engine.stats.preemptions == 0


class BrokenGraph:
    """A graph whose capture cannot be ended, as after a branch that was never joined."""

    def capture_begin(self, pool):
        pass

    def capture_end(self):
        raise RuntimeError("unjoined work")


def test_a_capture_broken_off_tells_what_broke_it():
    graph: Any = BrokenGraph()
    with pytest.raises(torch.OutOfMemoryError, match="seeded"), _recording(graph, (0, 0)):
        raise torch.OutOfMemoryError("seeded")
    with pytest.raises(RuntimeError, match="unjoined"), _recording(graph, (0, 0)):
        pass
