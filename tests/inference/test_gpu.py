"""What only a GPU shows: graphs, fused kernels, memory given back."""

from __future__ import annotations

import gc

import pytest
import torch
from nopad.inference import Engine, SamplingParams

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def llama(dtype=torch.bfloat16):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
    )
    return LlamaForCausalLM(config).cuda().to(dtype)


def prompts(count: int) -> list[list[int]]:
    return [[(7 * i + j) % 512 for j in range(3 + 11 * i % 90)] for i in range(count)]


def test_graphs_give_the_tokens_of_eager_steps_and_of_generate():
    model = llama(torch.float32)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    wanted = []
    for p in prompts(9):
        ids = torch.tensor([p], device="cuda")
        wanted.append(model.generate(ids, max_new_tokens=24, do_sample=False)[0, len(p) :].tolist())
    for graphs in (True, False):
        engine = Engine(model, memory=1 << 28, graphs=graphs, max_running=8)
        got = [c.tokens for c in engine.generate(prompts(9), GREEDY)]
        assert got == wanted
        assert (engine.stats.graph_steps > 0) == graphs


def test_an_evaluation_after_training_captures_no_new_graph_and_sees_the_new_weights():
    model = llama()
    engine = Engine(model, memory=1 << 28, max_running=8)
    engine.generate(prompts(6), GREEDY)
    before = engine.stats.graphs_captured
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(100):
        loss = sum(p.float().square().mean() for p in model.parameters())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    got = [c.tokens for c in engine.generate(prompts(6), GREEDY)]
    fresh = [
        c.tokens for c in Engine(model, memory=1 << 28, max_running=8).generate(prompts(6), GREEDY)
    ]
    assert engine.stats.graphs_captured == before > 0
    assert got == fresh


def test_keep_false_gives_all_memory_back():
    model = llama()
    # The first graph ever makes libraries keep workspaces for its streams; those stay.
    Engine(model, memory=1 << 26, keep=False).generate(prompts(6), GREEDY)
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        Engine(model, memory=1 << 28, keep=False).generate(prompts(6), GREEDY)
        assert torch.cuda.memory_allocated() == before


def test_wide_weights_under_autocast_compute_in_the_narrow_dtype():
    model = llama(torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        engine = Engine(model, memory=1 << 28, max_running=8)
        got = [c.tokens for c in engine.generate(prompts(4), GREEDY)]
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert all(len(tokens) == 24 for tokens in got)


@pytest.mark.parametrize("heat", [0.0, 0.9])
def test_samples_do_not_depend_on_the_batch(heat):
    model = llama(torch.float32)
    params = SamplingParams(temperature=heat, top_p=0.95, max_tokens=16, ignore_eos=True, seed=5)
    engine = Engine(model, memory=1 << 28, max_running=16)
    together = [c.tokens for c in engine.generate(prompts(7), params)]
    alone = [engine.generate([p], params)[0].tokens for p in prompts(7)]
    assert together == alone
