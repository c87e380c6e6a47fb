"""What only a GPU shows: CUDA graphs, fused kernels, freed memory."""

from __future__ import annotations

import gc
from itertools import accumulate

import pytest
import torch
from nopad.cli.tiny_model import randomize_weights, tiny_model
from nopad.inference import Engine, SamplingParams
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def llama(dtype=torch.bfloat16, family="llama"):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
    )
    return AutoModelForCausalLM.from_config(config).cuda().to(dtype)


def prompts(count: int) -> list[list[int]]:
    return [[(7 * i + j) % 512 for j in range(3 + 11 * i % 90)] for i in range(count)]


def test_graphs_give_the_tokens_of_eager_steps_and_of_generate():
    model = llama(torch.float32)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    want = []
    for p in prompts(9):
        ids = torch.tensor([p], device="cuda")
        want.append(model.generate(ids, max_new_tokens=24, do_sample=False)[0, len(p) :].tolist())
    for graphs in (True, False):
        engine = Engine(model, memory=1 << 28, cuda_graphs=graphs, max_num_seqs=8)
        got = [c.token_ids for c in engine.generate(prompts(9), GREEDY)]
        assert got == want
        assert (engine.stats.graph_steps > 0) == graphs


@pytest.mark.parametrize("kind", ["lfm2", "bamba", "qwen3_next"])
def test_decodes_of_models_with_states_run_as_graphs(kind):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind]()
    model = tiny_model(config, every_kind=True, attn_implementation="eager")[0].eval().cuda()
    randomize_weights(model)
    ids = [[3 + (7 * i + j) % 90 for j in range(1 + 5 * i)] for i in range(6)]
    got = []
    for graphs in (False, True):
        engine = Engine(model, memory=1 << 28, cuda_graphs=graphs, max_num_seqs=4)
        got.append([c.token_ids for c in engine.generate(ids, GREEDY)])
        assert (engine.stats.graph_steps > 0) == graphs
    assert got[0] == got[1]


def test_an_evaluation_after_training_captures_no_new_graph():
    model = llama()
    engine = Engine(model, memory=1 << 28, max_num_seqs=8)
    engine.generate(prompts(6), GREEDY)
    before = engine.stats.graphs_captured
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(100):
        loss = sum(p.float().square().mean() for p in model.parameters())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    got = [c.token_ids for c in engine.generate(prompts(6), GREEDY)]
    fresh = [
        c.token_ids
        for c in Engine(model, memory=1 << 28, max_num_seqs=8).generate(prompts(6), GREEDY)
    ]
    assert engine.stats.graphs_captured == before > 0
    assert got == fresh


def test_keep_memory_false_frees_all_memory():
    model = llama()
    # The first graph ever makes libraries keep workspaces for its streams; those stay.
    Engine(model, memory=1 << 26, keep_memory=False).generate(prompts(6), GREEDY)
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        Engine(model, memory=1 << 28, keep_memory=False).generate(prompts(6), GREEDY)
        assert torch.cuda.memory_allocated() == before


def test_pages_are_kept_once_training_has_taken_two_steps():
    model = llama().train()
    engine, optimizer = Engine(model), torch.optim.Adam(model.parameters())
    before = torch.cuda.memory_allocated() + (1 << 27)  # Adam's states, workspaces of libraries
    for step in range(3):
        engine.generate(prompts(3), GREEDY)
        gc.collect()
        assert (torch.cuda.memory_allocated() > before + (1 << 28)) == (step == 2)
        model(torch.tensor(prompts(1), device="cuda")).logits.sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_wide_weights_under_autocast_compute_in_the_narrow_dtype():
    model = llama(torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        engine = Engine(model, memory=1 << 28, max_num_seqs=8)
        got = [c.token_ids for c in engine.generate(prompts(4), GREEDY)]
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert all(len(tokens) == 24 for tokens in got)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_samples_do_not_depend_on_the_batch(temperature):
    model = llama(torch.float32)
    params = SamplingParams(
        temperature=temperature, top_p=0.95, max_tokens=16, ignore_eos=True, seed=5
    )
    engine = Engine(model, memory=1 << 28, max_num_seqs=16)
    batched = [c.token_ids for c in engine.generate(prompts(7), params)]
    alone = [engine.generate([p], params)[0].token_ids for p in prompts(7)]
    assert batched == alone


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2"])
def test_fused_decode_steps_give_the_logits_of_the_model(family):
    from nopad.attention import PagedCache, layer_shapes
    from nopad.inference.execution.capture import capture_mode
    from nopad.inference.fused.fused_ops import _run_step, apply_ops, verified_ops
    from nopad.inference.live_model.borrow import borrow_model

    model = llama(family=family)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=1.3 * parameter.shape[-1] ** -0.5)
    shapes = layer_shapes(model)
    parts = verified_ops(
        model, PagedCache(1, 256, shapes, torch.bfloat16, "cuda"), max_num_seqs=256
    )
    assert len(parts) == 6
    for rows in (1, 16, 30, 64, 100, 200):
        cache = PagedCache(rows, 256, shapes, torch.bfloat16, "cuda")
        lengths = [1 + 37 * row % 200 for row in range(rows)]
        after = [range(n, n + 1) for n in lengths]
        with borrow_model(model), capture_mode():
            _run_step(model, cache, [range(n) for n in lengths])
            want = _run_step(model, cache, after).float()
            with apply_ops(list(model.modules()), parts):
                assert parts[-1]._supported
                got = _run_step(model, cache, after).float()
        assert (got - want).norm() / want.norm() < 3e-2, rows
        mixed = [range(n, n + 1 + 9 * (row % 3)) for row, n in enumerate(lengths)]
        with borrow_model(model), capture_mode():
            want = _run_step(model, cache, mixed).float()
            with apply_ops(list(model.modules()), parts):
                got = _run_step(model, cache, mixed).float()
        assert (got - want).norm() / want.norm() < 3e-2, rows


@pytest.mark.parametrize("captured", [True, False])
def test_the_last_layer_computes_the_tokens_with_logits_alone(captured):
    from nopad.attention import PagedCache, layer_shapes
    from nopad.inference.execution.capture import capture_mode
    from nopad.inference.fused.fused_ops import _run_step, apply_ops, verified_ops
    from nopad.inference.live_model.borrow import borrow_model

    model = llama()
    shapes = layer_shapes(model)
    parts = verified_ops(model, PagedCache(1, 256, shapes, torch.bfloat16, "cuda"))
    for rows in (3, 20) if captured else (20, 70):  # more than 4096 tokens without a graph
        cache = PagedCache(rows, 256, shapes, torch.bfloat16, "cuda")
        spans = [range(256 - row % 3) for row in range(rows)]
        keep = [total - 1 for total in accumulate(map(len, spans))]
        with borrow_model(model), capture_mode(captured):
            want = _run_step(model, cache, spans, keep).float()
            with apply_ops(list(model.modules()), parts):
                got = _run_step(model, cache, spans, keep).float()
        assert got.shape[1] == rows and (got - want).norm() / want.norm() < 3e-2, rows


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_prompts_that_join_in_captured_steps_change_no_tokens(family, temperature):
    """A request arrives every other step; prompts are cut into chunks that no ladder knows."""
    model = llama(torch.float32, family)
    params = SamplingParams(temperature=temperature, max_tokens=24, ignore_eos=True, seed=3)
    results = {}
    for graphs in (True, False):
        engine = Engine(
            model, memory=1 << 28, cuda_graphs=graphs, max_num_seqs=8, max_num_batched_tokens=70
        )
        tokens: dict[int, list[int]] = {}
        todo = prompts(12)
        while todo or engine._loop.busy:
            if todo:
                tokens[engine.add_request(todo.pop(0), params)] = []
            for _ in range(2):
                for event in engine.step():
                    tokens[event.request_id] += event.token_ids
        results[graphs] = list(tokens.values())
        share = engine.stats.graph_steps / engine.stats.steps
        assert share > 0.9 if graphs else share == 0
    assert results[True] == results[False]
    assert all(len(each) == 24 for each in results[True])


def test_graphs_stay_within_the_memory_set_aside_for_them():
    from nopad.inference.execution.cuda_graphs import graph_bytes

    model = llama()
    engine = Engine(model, memory=1 << 29, max_num_seqs=16)
    for count in (16, 3):
        engine.generate(prompts(count), GREEDY)
    graphs = engine._executor.runner.replays._graphs
    assert len(graphs) > 1 and graphs._byte_budget == graph_bytes(
        16, 512, model.config.hidden_size, 2
    )
    before = len(graphs)
    graphs._used_bytes = graphs._byte_budget
    done = engine.generate(prompts(11), GREEDY)
    assert all(len(c.token_ids) == 24 for c in done) and len(graphs) == before


def test_steps_go_on_without_a_graph_whose_capture_did_not_fit(monkeypatch):
    engine = Engine(llama(torch.float32), memory=1 << 28, max_num_seqs=8)
    want = [c.token_ids for c in engine.generate(prompts(4), GREEDY)]
    runner = engine._executor.runner
    runner.replays.drop()
    forward, broken = runner.forward, []

    def full(*args):
        logits = forward(*args)
        if torch.cuda.is_current_stream_capturing():
            broken.append(1)
            raise torch.OutOfMemoryError("seeded")
        return logits

    monkeypatch.setattr(runner, "forward", full)
    before = engine.max_num_batched_tokens, engine.max_num_seqs
    assert [c.token_ids for c in engine.generate(prompts(4), GREEDY)] == want and len(broken) == 1
    assert (engine.max_num_batched_tokens, engine.max_num_seqs) == before


def test_graphs_follow_adapters_that_are_switched():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(1)
    settings = peft.LoraConfig(
        r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    lora = peft.get_peft_model(llama(torch.float32), settings).eval()

    def tokens(engine):
        return [c.token_ids for c in engine.generate(prompts(5), GREEDY)]

    eager = Engine(lora, memory=1 << 28, max_num_seqs=8, cuda_graphs=False)
    engine = Engine(lora, memory=1 << 28, max_num_seqs=8)
    on = tokens(engine)
    with lora.disable_adapter():
        off = tokens(engine)
        assert off == tokens(eager) != on
    assert tokens(engine) == on == tokens(eager)
    assert tokens(engine) == on  # prompts are cached now: steps of other shapes
    captured = len(engine._executor.runner.replays._graphs)
    assert tokens(engine) == on and len(engine._executor.runner.replays._graphs) == captured > 0


def test_calls_inside_inference_mode_and_outside_it_are_alike():
    model = llama(torch.float32)
    engine = Engine(model, memory=1 << 28, max_num_seqs=8)
    with torch.inference_mode():
        inside = [c.token_ids for c in engine.generate(prompts(6), GREEDY)]
    outside = [c.token_ids for c in engine.generate(prompts(6), GREEDY)]
    penalised = SamplingParams(temperature=0.8, repetition_penalty=1.2, max_tokens=8, seed=1)
    with torch.inference_mode():
        drawn = [c.token_ids for c in engine.generate(prompts(6), penalised)]
    assert inside == outside and engine.stats.graph_steps > 0
    assert drawn == [c.token_ids for c in engine.generate(prompts(6), penalised)]


def test_copies_of_wide_weights_follow_an_optimizer_under_the_same_graphs():
    model = llama(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with torch.autocast("cuda", torch.bfloat16):
        engine = Engine(model, memory=1 << 28, max_num_seqs=8)
        before = [c.token_ids for c in engine.generate(prompts(4), GREEDY)]
        captured = engine.stats.graphs_captured
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter) * 0.1
        optimizer.step()
        after = [c.token_ids for c in engine.generate(prompts(4), GREEDY)]
        fresh = Engine(model, memory=1 << 28, max_num_seqs=8)
        assert after == [c.token_ids for c in fresh.generate(prompts(4), GREEDY)] != before
    assert engine.stats.graphs_captured == captured > 0
