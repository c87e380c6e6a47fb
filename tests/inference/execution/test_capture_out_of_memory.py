"""Out of memory: a graph is skipped, a step is made smaller; no GPU needed."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nopad.inference import Engine, SamplingParams
from nopad.inference.execution import capture
from nopad.inference.execution.cuda_graphs import StepGraphs, _capture_into

FULL = [
    torch.OutOfMemoryError("seeded"),
    torch.AcceleratorError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def graphs(monkeypatch) -> StepGraphs:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    nothing: Any = None
    return StepGraphs(nothing, torch.zeros(65, dtype=torch.int64), byte_budget=1, max_model_len=64)


@pytest.mark.parametrize("full", FULL, ids=lambda error: type(error).__name__)
def test_a_graph_that_does_not_fit_leaves_the_steps_as_they_are(
    tiny, graphs, monkeypatch, caplog, full
):
    attempts = []

    def capture(shape, forward):
        attempts.append(1)
        raise full

    engine = Engine(tiny("llama"), page_size=16)
    want = [c.token_ids for c in engine.generate([[5, 6], [7, 8, 9]], GREEDY)]
    assert engine._executor is not None
    monkeypatch.setattr(graphs, "_capture", capture)
    engine._executor.runner.replays._graphs = graphs
    before = engine.max_num_batched_tokens, engine.max_num_seqs
    got = [c.token_ids for c in engine.generate([[5, 6], [7, 8, 9]], GREEDY)]
    assert got == want and (engine.max_num_batched_tokens, engine.max_num_seqs) == before
    assert len(attempts) == 1 and "no more graphs" in caplog.text
    assert engine.stats.preemptions == 0


@pytest.mark.parametrize("full", FULL, ids=lambda error: type(error).__name__)
def test_a_step_that_does_not_fit_is_made_smaller(tiny, monkeypatch, full):
    engine = Engine(tiny("llama"), page_size=16)
    want = [c.token_ids for c in engine.generate([[5, 6], [7, 8, 9]], GREEDY)]
    assert engine._executor is not None
    runner = engine._executor.runner
    real = runner._launch

    def launch(step):
        if len(step.requests) > 1:
            raise full
        return real(step)

    monkeypatch.setattr(runner, "_launch", launch)
    assert [c.token_ids for c in engine.generate([[5, 6], [7, 8, 9]], GREEDY)] == want


def test_an_error_that_is_not_about_memory_is_told(tiny, graphs, monkeypatch):
    def capture(shape, forward):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    engine = Engine(tiny("llama"), page_size=16)
    engine.generate([[5, 6]], GREEDY)
    assert engine._executor is not None
    monkeypatch.setattr(graphs, "_capture", capture)
    engine._executor.runner.replays._graphs = graphs
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.generate([[5, 6]], GREEDY)


class Stream:
    """A stream that records what it waited for; waiting can be made to fail."""

    def __init__(self, broken: bool = False):
        self.waited, self._broken = [], broken

    def wait_stream(self, other):
        self.waited.append(other)
        if self._broken:
            raise RuntimeError("the capture is invalid")


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_branch_that_does_not_fit_leaves_no_fork_open(monkeypatch, failing, broken):
    main, sides = Stream(broken), [Stream(), Stream()]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(capture, "capture_streams", lambda device: [None, *sides])

    def branch(index):
        def run(x):
            if index == failing:
                raise torch.OutOfMemoryError("seeded")

        return run

    x: Any = SimpleNamespace(is_cuda=True, device=None)
    with pytest.raises(torch.OutOfMemoryError, match="seeded"), capture.capture_mode():
        capture.run_on_streams(x, *map(branch, range(3)))
    forked = [side for side in sides if side.waited]
    assert main.waited == (forked[:1] if broken else forked)
    assert len(forked) == (failing or 2)


class BrokenGraph:
    """A graph whose capture cannot end, as after a branch that was never joined."""

    def capture_begin(self, pool, capture_error_mode):
        pass

    def capture_end(self):
        raise RuntimeError("unjoined work")


def test_a_capture_broken_off_tells_what_broke_it():
    graph: Any = BrokenGraph()
    with pytest.raises(torch.OutOfMemoryError, match="seeded"), _capture_into(graph, (0, 0)):
        raise torch.OutOfMemoryError("seeded")
    with pytest.raises(RuntimeError, match="unjoined"), _capture_into(graph, (0, 0)):
        pass
