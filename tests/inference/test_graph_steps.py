"""Steps padded to a graph's shape give what the steps themselves give; no GPU needed.

A graph is played here by a function that computes again from the same inputs at each replay.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nopad.inference import Engine, SamplingParams
from nopad.inference import graphs as graphs_module
from nopad.inference.graphs import StepGraphs, _blank, _Captured, _Inputs
from nopad.inference.staging import pack, views


class Played(StepGraphs):
    """Graphs that need no device."""

    def _capture(self, shape, inputs, forward) -> Any:
        blank = _blank(inputs, nobody=len(self._newest) - 1)
        packed, places = pack(blank)
        given = _Inputs(*views(packed, blank, places))
        logits, tokens = self._step(shape, given, forward)

        def replay() -> None:
            for kept, new in zip((logits, tokens), self._step(shape, given, forward), strict=True):
                kept.copy_(new)

        return _Captured(SimpleNamespace(replay=replay), packed, logits, tokens)  # pyright: ignore


@pytest.fixture
def played(monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    empty = torch.empty

    def unpinned(*size, pin_memory=False, **options):
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(graphs_module, "MIXED", (8, 16, 32))

    def play(engine: Engine) -> Engine:
        engine.generate([[5]], SamplingParams(temperature=0, max_tokens=1))
        assert engine._machine is not None
        runner = engine._machine.runner
        runner._graphs = Played(runner.cache, runner._newest, room=1)
        engine.stats.reset()
        return engine

    return play


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2"])
@pytest.mark.parametrize("tokens", [7, 16, 40])
def test_steps_in_graphs_give_the_tokens_of_single_steps(tiny, played, family, tokens):
    model, generator = tiny(family), torch.Generator().manual_seed(tokens)
    lengths = torch.randint(1, 40, (12,), generator=generator).tolist()
    prompts = [torch.randint(3, 90, (n,), generator=generator).tolist() for n in lengths]
    params = [SamplingParams(temperature=i % 2, max_tokens=3 + i, seed=i) for i in range(12)]
    settings = {"max_running": 5, "tokens_per_step": tokens, "page_size": 16}
    want = Engine(model, graphs=False, **settings).generate(prompts, params)
    engine = played(Engine(model, **settings))
    got = engine.generate(prompts, params)
    assert [c.tokens for c in got] == [c.tokens for c in want]
    shapes = engine._machine.runner._graphs._captured
    assert {shape.mixed for shape in shapes} == {False, True}
    if tokens <= 32:
        assert engine.stats.graph_steps == engine.stats.steps


def test_scores_in_graphs_are_those_of_single_steps(tiny, played):
    model = tiny("llama")
    contexts = [list(range(3, 3 + n)) for n in (5, 21, 9)]
    ends = [[[7, 8], [9]], [[4, 5, 6], [10, 11]], [[12], [13, 14, 15, 16]]]
    settings = {"max_running": 5, "tokens_per_step": 16, "page_size": 16}
    want = Engine(model, graphs=False, **settings).score(contexts, ends)
    engine = played(Engine(model, **settings))
    got = engine.score(contexts, ends)
    flat = [[s.logprob for some in scores for s in some] for scores in (got, want)]
    assert flat[0] == pytest.approx(flat[1], abs=1e-5)
    assert engine.stats.graph_steps == engine.stats.steps
    both = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1)
    outs = [e.generate(contexts, both) for e in (engine, Engine(model, graphs=False, **settings))]
    assert [c.tokens for c in outs[0]] == [c.tokens for c in outs[1]]
    for ours, theirs in zip(*outs, strict=True):
        assert len(ours.prompt_logprobs) == len(theirs.prompt_logprobs)
        pairs = zip(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], strict=True)
        assert all(a.logprob == pytest.approx(b.logprob, abs=1e-5) for a, b in pairs)
