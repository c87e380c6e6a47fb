"""Which graph runs a step, and what happens if a backend cannot be captured; no GPU needed."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from nopad.attention.backends import NotCapturable, force_paged_backend
from nopad.inference import Engine, SamplingParams, session
from nopad.inference.execution.cuda_graphs import StepGraphs
from nopad.inference.execution.model_runner import ModelRunner
from nopad.inference.metrics.stats import Stats


def step(rows: int = 3, pages: int = 2) -> Any:
    return SimpleNamespace(
        requests=[None] * rows, sampled_requests=[None] * rows, logits_indices=[None] * rows,
        max_query_len=1, page_table=np.zeros((rows, pages), np.int32),
    )  # fmt: skip


@pytest.fixture
def graphs(monkeypatch) -> StepGraphs:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    nothing: Any = None
    return StepGraphs(nothing, torch.zeros(5, dtype=torch.int64), byte_budget=1, max_model_len=64)


def test_a_backend_asked_for_by_name_has_graphs_of_its_own(graphs, monkeypatch):
    plain = graphs._shape(step())
    with force_paged_backend("flash2"):
        named = graphs._shape(step())
    monkeypatch.setenv("NOPAD_ATTENTION", "flash2")
    assert plain != named == graphs._shape(step())


def test_without_room_no_backend_replays_the_graph_of_another(graphs):
    graphs._captured = {graphs._shape(step(rows=8)): None}
    graphs._used_bytes = graphs._byte_budget
    assert graphs._shape(step()) == (None, False, 8, 8, 4)
    with force_paged_backend("flash2"):
        assert graphs._shape(step()) is None and not graphs.can_run(step())


def test_a_backend_that_cannot_be_captured_leaves_the_graphs_of_others(caplog):
    attempts = []

    class Graphs(list):
        def can_run(self, step):
            return True

        def run(self, step, forward):
            attempts.append(1)
            raise NotCapturable("it reads lengths on the host")

    nothing: Any = None
    cpu = torch.device("cpu")
    cache: Any = SimpleNamespace(layer_shapes=[(1, 8, 8)])
    runner = ModelRunner(nothing, cache, 4, Stats(), cpu, graph_byte_budget=0, max_model_len=64)
    runner.replays._graphs = Graphs()  # pyright: ignore[reportAttributeAccessIssue]
    with caplog.at_level(logging.INFO, "nopad.inference"), force_paged_backend("sdpa"):
        for _ in range(3):
            assert runner.replays.replay(step(), runner.forward) is None
    assert len(attempts) == len(caplog.records) == 1 and "lengths" in caplog.text
    runner.replays.replay(step(), runner.forward)
    assert len(attempts) == 2


def test_while_forwards_gather_parameters_nothing_is_captured(tiny, monkeypatch):
    class Graphs(list):
        def can_run(self, step):
            return True

        def run(self, step, forward):
            return "replayed"

    engine = Engine(tiny("llama"))
    captures = []
    for gathering in (False, True, False):
        monkeypatch.setattr(session, "gathers_parameters", lambda model, now=gathering: now)
        engine.generate([[5, 6]], SamplingParams(max_tokens=1))
        assert engine._executor is not None
        runner = engine._executor.runner
        runner.replays._graphs = Graphs()  # pyright: ignore[reportAttributeAccessIssue]
        captures.append(runner.replays.replay(step(), runner.forward))
        runner.replays._graphs = None
    assert captures == ["replayed", None, "replayed"]
