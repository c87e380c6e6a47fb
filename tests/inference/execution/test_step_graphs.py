"""Steps as CUDA graphs run them, without a GPU: a graph's body is run again at each replay."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from nopad.cli.tiny_model import randomize_weights, tiny_model
from nopad.inference import Engine, SamplingParams
from nopad.inference.execution import cuda_graphs, graph_shape
from nopad.inference.execution.capture import capture_mode
from nopad.inference.execution.cuda_graphs import StepGraphs
from nopad.inference.fused import fused_ops
from nopad.inference.fused.compiled_layers import CompiledLayers
from nopad.inference.scheduling.step_costs import StepCosts
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SLOWLY = pytest.mark.slow
IN_PLACE = {"lfm2", "olmo_hybrid", "qwen3_5_text", "qwen3_next"}
"""Types whose states are all updated by functions that the engine has kernels for."""


class ReplayedGraphs(StepGraphs):
    """Graphs that run their body over their inputs, and write to the tensors of the first run."""

    def _record(self, body, frees_cache) -> Any:
        outputs = body()

        def replay() -> None:
            with capture_mode():
                for output, new in zip(outputs, body(), strict=True):
                    output.copy_(new)

        return SimpleNamespace(replay=replay), *outputs


def argmax_into(logits, rows, last_tokens, slot, host_tokens) -> torch.Tensor:
    """Do what the kernel of this name does."""
    tokens = logits.argmax(-1)
    last_tokens[rows] = tokens
    if slot >= 0:
        width = min(len(tokens), host_tokens.shape[1])
        host_tokens[int(slot), :width] = tokens[:width]
    return tokens


@pytest.fixture
def make_engine(tiny, monkeypatch):
    """Return engines whose steps run as graphs, or not, on one model."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    for module in (graph_shape, cuda_graphs):
        monkeypatch.setattr(module, "MIXED_TOKENS", (8, 16, 24, 48))
    monkeypatch.setattr(graph_shape, "_MIXED_SEQS", (2, 4, 8))
    monkeypatch.setattr(cuda_graphs, "argmax_into", argmax_into)
    monkeypatch.setattr(cuda_graphs, "copy_words", lambda source, target: target.copy_(source))

    def build(graphs: bool, by_kernels: bool = False, model: Any = None, **settings: Any) -> Engine:
        engine = Engine(model or tiny("llama"), page_size=16, **settings)
        engine.generate([[5, 6]], SamplingParams(temperature=0, max_tokens=2))
        if graphs:
            assert engine._executor is not None
            runner = engine._executor.runner
            runner.replays._graphs = ReplayedGraphs(
                runner.cache, runner._last_tokens, 4, 64, runner.states
            )
            runner.replays._graphs._by_kernels = by_kernels
        engine.reset_prefix_cache()
        engine.stats.reset()
        return engine

    return build


def run_staggered(engine: Engine, params: list[SamplingParams], gap: int) -> list[list[int]]:
    """Add a request every `gap` steps; return the tokens of each."""
    rng, tokens = np.random.default_rng(0), {}
    todo = [(rng.integers(3, 90, rng.integers(1, 30)).tolist(), each) for each in params]
    while todo or engine._loop.busy:
        if todo:
            prompt, each = todo.pop(0)
            tokens[engine.add_request(prompt, each)] = []
        for _ in range(gap):
            for event in engine.step():
                tokens[event.request_id] += event.token_ids
    return list(tokens.values())


@pytest.mark.parametrize("by_kernels", [False, True])
@pytest.mark.parametrize("limits", [{}, {"max_num_batched_tokens": 11}, {"max_num_seqs": 3}])
def test_prompts_that_join_in_captured_steps_change_no_tokens(make_engine, limits, by_kernels):
    greedy = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    drawn = SamplingParams(temperature=0.9, top_p=0.9, max_tokens=7, ignore_eos=True, seed=3)
    biased = SamplingParams(temperature=0, max_tokens=6, logit_bias={5: 2.0}, presence_penalty=1.0)
    params = [greedy, drawn, biased] * 4
    want = run_staggered(make_engine(False, **limits), params, 1)
    engine = make_engine(True, by_kernels, **limits)
    assert run_staggered(engine, params, 1) == want
    assert engine.stats.graph_steps == engine.stats.steps  # prompts are shorter than the ladder
    assert engine.stats.padded_rows > 0


@pytest.mark.parametrize(
    "kind",
    ["lfm2", "bamba", "qwen3_5_text", *(pytest.param(kind, marks=SLOWLY) for kind in
     ("falcon_mamba", "jamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_next"))],
)  # fmt: skip
@pytest.mark.parametrize("limits", [{}, {"max_num_seqs": 3}])
@pytest.mark.usefixtures("small_delta_rules")
@pytest.mark.parametrize("layers", ["stock", "fused", pytest.param("compiled", marks=SLOWLY)])
def test_decodes_of_models_with_states_are_captured(make_engine, kind, limits, layers, monkeypatch):
    """A graph's padding rows, and the prompts that join between replays, change no state."""
    torch.manual_seed(0)
    model = tiny_model(CONFIG_MAPPING[kind](), every_kind=True, attn_implementation="eager")[
        0
    ].eval()
    randomize_weights(model)
    greedy = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    drawn = SamplingParams(temperature=0.9, top_p=0.9, max_tokens=7, ignore_eos=True, seed=3)
    params = [greedy, drawn] * 4
    want = run_staggered(make_engine(False, model=model, **limits), params, 2)
    engine = make_engine(True, model=model, **limits)
    if layers != "stock":
        pytest.importorskip("triton", reason="the kernels are written in Triton")
        if torch.cuda.is_available():
            pytest.skip(reason="kernels are not interpreted on a GPU")
        compile_layers = partial(CompiledLayers, backend="eager") if layers == "compiled" else Fails
        monkeypatch.setattr(fused_ops, "CompiledLayers", compile_layers)
        runner = engine._executor.runner
        ops = fused_ops.verified_ops(model, runner.cache, 8, runner.states)
        engine._executor.fused_ops = fused_ops.FusedOps(ops)
        names = {op.__name__ for op in ops}
        assert ("compiled layers" in names) == (layers == "compiled")
        assert ("kernels for states" in names) == (kind in IN_PLACE)
    assert run_staggered(engine, params, 2) == want
    assert 0 < engine.stats.graph_steps < engine.stats.steps and engine.stats.padded_rows > 0


class Fails:
    """Layers that cannot be compiled."""

    __name__ = "none"

    def __init__(self, *_: Any):
        pass

    def __call__(self, *_: Any) -> None:
        raise AssertionError


def test_a_first_token_starts_its_state_outside_of_a_graph(make_engine):
    """A prompt of one token looks like a decode, and its row holds the state of another request."""
    model = tiny_model(CONFIG_MAPPING["lfm2"](), every_kind=True, attn_implementation="eager")[0]
    randomize_weights(model.eval())
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    want = make_engine(False, model=model).generate([[7]], greedy)
    engine = make_engine(True, model=model, max_num_seqs=1)
    engine.generate([list(range(3, 20))], greedy)
    assert engine.generate([[7]], greedy)[0].token_ids == want[0].token_ids
    assert engine.stats.graph_steps


def test_a_state_that_cannot_be_captured_runs_eagerly(make_engine, monkeypatch, caplog):
    model = tiny_model(CONFIG_MAPPING["lfm2"](), every_kind=True, attn_implementation="eager")[0]
    randomize_weights(model.eval())
    params = [SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)] * 2
    want = run_staggered(make_engine(False, model=model), params, 2)
    engine = make_engine(True, model=model)

    def refuse(self, body, frees_cache):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(ReplayedGraphs, "_record", refuse)
    assert run_staggered(engine, params, 2) == want
    assert not engine.stats.graph_steps
    assert caplog.text.count("steps run without CUDA graphs: a layer with a state") == 1


def test_where_latency_matters_no_prompt_waits_for_a_capture(make_engine):
    """Graphs are captured before the first step; later steps find theirs."""
    params = [SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)] * 12
    want = run_staggered(make_engine(False), params, 1)
    engine = make_engine(True)
    assert engine._executor is not None
    runner: Any = engine._executor.runner
    runner.replays._tokens_ahead = 48
    engine.generate([[3, 4, 5]], SamplingParams(temperature=0, max_tokens=1))
    ahead = set(runner.replays._graphs._captured)
    # (8, 16, 24, 48) tokens of (2, 4, 8) requests; (1, 2, 4, 8) decodes: a request has 4 pages
    assert len(ahead) == 12 + 4
    engine.reset_prefix_cache()
    assert run_staggered(engine, params, 1) == want
    assert {shape for shape in runner.replays._graphs._captured if shape.num_seqs <= 8} == ahead


def test_graphs_are_captured_ahead_of_the_first_step_alone(make_engine):
    """Also if no graph holds that step; and not again, when running requests would wait for it."""
    engine = make_engine(True)
    assert engine._executor is not None
    runner: Any = engine._executor.runner
    runner.replays._tokens_ahead = 48
    engine.generate([[5] * 60], SamplingParams(temperature=0, max_tokens=1))
    assert engine.stats.graph_steps == 0 and len(runner.replays._graphs) == 12 + 4
    runner.replays._graphs = ReplayedGraphs(
        runner.cache, runner._last_tokens, 1, 64
    )  # as for an adapter
    engine.generate([[3, 4, 5]], SamplingParams(temperature=0, max_tokens=1))
    assert engine.stats.graph_steps == 1 and len(runner.replays._graphs) == 1


def test_captures_ahead_leave_memory_to_decodes_of_longer_requests(make_engine):
    engine = make_engine(True)
    assert engine._executor is not None
    runner: Any = engine._executor.runner
    runner.replays._tokens_ahead, runner.replays._graphs._used_bytes = 48, 3  # of 4
    engine.generate([[5] * 60], SamplingParams(temperature=0, max_tokens=1))
    assert len(runner.replays._graphs) == 12 and all(
        shape.mixed for shape in runner.replays._graphs._captured
    )


def test_only_engines_with_a_target_latency_capture_ahead(tiny):
    for target_itl, tokens_ahead in ((None, 0), (0.01, 20)):
        engine = Engine(
            tiny("llama"), page_size=16, target_itl=target_itl, max_num_batched_tokens=20
        )
        engine.generate([[5, 6]], SamplingParams(temperature=0, max_tokens=2))
        assert engine._executor is not None
        assert engine._executor.runner.replays._tokens_ahead == tokens_ahead


def test_scores_of_captured_steps_are_those_of_the_model(make_engine):
    contexts = [list(range(3, 3 + n)) for n in (1, 9, 20)]
    continuations = [[[7, 8], [9]], [[11, 12, 13]], [[4] * 3, [5]]]
    want = make_engine(False).score(contexts, continuations)
    engine = make_engine(True)
    got = engine.score(contexts, continuations)
    assert engine.stats.graph_steps > 0
    for ours, theirs in zip(got, want, strict=True):
        assert [s.logprob for s in ours] == pytest.approx([s.logprob for s in theirs], abs=1e-5)


def test_a_mixed_step_that_cannot_be_captured_runs_eagerly(make_engine, monkeypatch, caplog):
    params = [SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)] * 4
    want = run_staggered(make_engine(False), params, 2)
    engine = make_engine(True)
    record = ReplayedGraphs._record

    def refuse(self, body, frees_cache):
        if not frees_cache:
            raise RuntimeError("operation not permitted when stream is capturing")
        return record(self, body, frees_cache)

    monkeypatch.setattr(ReplayedGraphs, "_record", refuse)
    assert run_staggered(engine, params, 2) == want
    assert 0 < engine.stats.graph_steps < engine.stats.steps
    assert caplog.text.count("steps with prompts run without graphs") == 1
    assert engine._executor.runner.step_sizes == ()


def test_steps_are_cut_only_to_graphs_that_exist_or_can_be_captured(make_engine):
    runner = make_engine(True)._executor.runner
    assert runner.step_sizes == (8, 16, 24, 48)
    runner.replays.may_capture = False
    assert runner.step_sizes == ()
    runner.replays.may_capture = True
    runner.replays._uncapturable.add(None)
    assert runner.step_sizes == ()
    runner.replays._uncapturable.clear()
    runner.replays._graphs._used_bytes = runner.replays._graphs._byte_budget
    assert list(runner.step_sizes) == []
    for tokens in (24, 8):
        runner.replays._graphs._captured[graph_shape.GraphShape(None, True, tokens, 2, 8)] = None
    assert list(runner.step_sizes) == [8, 24]


@pytest.mark.parametrize("graphs", [True, False])
def test_steps_that_requests_wait_for_are_smaller_as_graphs(make_engine, graphs):
    engine = make_engine(graphs)
    engine._loop.costs.max_tokens_while_decoding = 24
    sizes, launch = [], engine._executor.runner.launch
    engine._executor.runner.launch = lambda step: sizes.append(len(step.token_ids)) or launch(step)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

    def add_long_and_run(first_id: int) -> list[int]:
        engine.add_request(list(range(first_id, first_id + 40)), params)
        sizes.clear()
        for _ in range(4):
            engine.step()
        return sizes[:3]

    assert add_long_and_run(3)[:2] == [40, 1]  # nobody waits for the first step
    assert add_long_and_run(13) == ([24, 18, 2] if graphs else [41, 2, 2])
    engine.max_num_batched_tokens = 512  # what a user sets is what all steps get
    assert add_long_and_run(23) == [42, 3, 3]


def test_prompts_are_cut_so_that_no_step_exceeds_its_target(make_engine):
    engine = make_engine(True, target_itl=0.0045)
    loop = engine._loop
    loop.costs = costs = StepCosts(target_itl=0.0045)
    for tokens in (1, 8, 24, 48, 10, 30):
        costs.record(tokens, 1e-3 + 1e-4 * tokens)
    costs.record = lambda *_: None  # the clock of a test machine says nothing
    assert costs.tokens_within(0.0045) == 35
    sizes = []
    launch = engine._executor.runner.launch
    engine._executor.runner.launch = lambda step: sizes.append(len(step.token_ids)) or launch(step)
    engine.add_request([5, 6], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    for _ in range(3):
        engine.step()
    long = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    engine.add_request(list(range(3, 53)), long)
    while engine._loop.busy:
        engine.step()
    assert max(sizes) == 24  # the largest size without padding that holds no more than 35 tokens
    assert sizes.count(24) == 2 and sum(sizes) >= 62
