"""Evaluation leaves no trace: training with evaluations gives bitwise the same weights."""

from __future__ import annotations

import hashlib
import random
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from nopad.inference import Engine, SamplingParams
from nopad.inference.live_model import borrow

SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, max_tokens=6)
GREEDY = SamplingParams(temperature=0, max_tokens=6)


def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        attention_dropout=0.1,
    )
    made = LlamaForCausalLM(config)
    made.gradient_checkpointing_enable()
    made.train()
    made.model.layers[0].mlp.eval()  # one flag differs from the others
    return made


def trace_of(m) -> dict:
    """Return everything that an evaluation might change."""
    return {
        "weights": digest(p for p in m.parameters()),
        "grads": [p.grad is None or digest([p.grad]) for p in m.parameters()],
        "versions": [p._version for p in m.parameters()],
        "flags": [x.training for x in m.modules()],
        "requires": [p.requires_grad for p in m.parameters()],
        "dtypes": [p.dtype for p in m.parameters()],
        "attributes": [sorted(x.__dict__) for x in m.modules()],
        "parameters": [list(x._parameters) for x in m.modules()],
        "hooks": [len(x._forward_hooks) + len(x._forward_pre_hooks) for x in m.modules()],
        "attention": m.config._attn_implementation,
        "use_cache": m.config.use_cache,
        "checkpointing": m.is_gradient_checkpointing,
        "random": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "torch": digest([torch.get_rng_state()]),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "cache_casts": torch.is_autocast_cache_enabled(),
        "grad_mode": torch.is_grad_enabled(),
        "default": torch.get_default_dtype(),
    }


def digest(tensors) -> str:
    h = hashlib.sha256()
    for t in tensors:
        h.update(t.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()


def evaluate(engine, how: str) -> None:
    if how == "greedy":
        engine.generate([[3, 4, 5], [6]], GREEDY)
    elif how == "sampled":
        engine.generate([[3, 4, 5], [6]], SAMPLED)
    elif how == "scored":
        engine.score([[3, 4]], [[[5], [6, 7]]])
    elif how == "streamed":
        for _ in engine.stream([[3, 4, 5], [6]], SAMPLED):
            break
    elif how == "raises":
        with pytest.raises(RuntimeError, match="seeded"):
            broken(engine)
    else:
        with pytest.raises(KeyboardInterrupt):
            broken(engine, KeyboardInterrupt)


def broken(engine, kind=RuntimeError) -> None:
    engine.generate([[3, 4]], GREEDY)
    runner = engine._executor.runner
    runner.launch = lambda step: (_ for _ in ()).throw(kind("seeded"))
    engine.generate([[3, 4]], GREEDY)


WAYS = ["greedy", "sampled", "scored", "streamed", "raises", "interrupted"]


@pytest.mark.parametrize("how", WAYS)
def test_nothing_shows_after_a_call(how):
    m = model()
    m(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    engine = Engine(m)
    before = trace_of(m)
    evaluate(engine, how)
    after = trace_of(m)
    assert {k for k in before if before[k] != after[k]} == set()


@pytest.mark.parametrize("how", WAYS)
def test_training_with_evaluations_is_bitwise_training_without(how):
    def train(evaluations: bool) -> str:
        m = model()
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
        engine = Engine(m)
        torch.manual_seed(1)
        for step in range(12):
            ids = torch.randint(3, 64, (2, 9))
            m(input_ids=ids, labels=ids).loss.backward()
            if evaluations and step % 3 == 1:
                evaluate(engine, how)  # gradients exist, and must be kept
            optimizer.step()
            optimizer.zero_grad()
            if evaluations and step % 3 == 2:
                evaluate(engine, how)
        return digest(m.parameters())

    assert train(True) == train(False)


def test_wide_weights_under_autocast_are_neither_cast_nor_changed():
    m = model()
    engine = Engine(m)
    before = trace_of(m)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = engine.generate([[3, 4, 5]], GREEDY)[0].token_ids
    assert trace_of(m) == before
    assert engine._executor.runner.cache.layer(0)[0].dtype == torch.bfloat16
    asked = Engine(m, dtype=torch.bfloat16).generate([[3, 4, 5]], GREEDY)[0].token_ids
    assert asked == narrow


def test_a_weight_update_is_noticed_in_every_form():
    m = model()
    engine = Engine(m)
    prompt = list(range(3, 40))
    ways = {
        "optimizer": lambda: torch.optim.SGD(m.parameters(), lr=0.5).step(),
        "data": lambda: m.lm_head.weight.data.mul_(-1),
        "load": lambda: m.load_state_dict({k: -v for k, v in m.state_dict().items()}),
        "swap": lambda: setattr(
            m.lm_head, "weight", torch.nn.Parameter(-m.lm_head.weight.detach())
        ),
    }
    for change in ways.values():
        engine.generate([prompt], GREEDY)
        m(input_ids=torch.tensor([prompt]), labels=torch.tensor([prompt])).loss.backward()
        change()
        m.zero_grad()
        ran = engine.stats.num_computed_tokens
        got = engine.generate([prompt], GREEDY)[0].token_ids
        assert engine.stats.num_computed_tokens - ran == len(prompt) + 5, "a stale prefix was used"
        assert got == Engine(m).generate([prompt], GREEDY)[0].token_ids


@pytest.mark.timeout(0)
@pytest.mark.parametrize("cycles", [10, pytest.param(1000, marks=pytest.mark.slow)])
def test_cycles_of_update_and_evaluation_equal_a_fresh_engine(cycles):
    m = model()
    engine = Engine(m, debug=True)
    prompts = [list(range(3, 40)), list(range(3, 30))]
    for cycle in range(cycles):
        with torch.no_grad():
            for p in m.parameters():
                p.add_(torch.full_like(p, 0.01 * (-1) ** cycle) * torch.arange(p.shape[-1]).cos())
        got = [c.token_ids for c in engine.generate(prompts, GREEDY)]
        assert got == [c.token_ids for c in Engine(m).generate(prompts, GREEDY)], f"cycle {cycle}"


def test_weights_that_change_under_running_requests_are_noticed():
    m = model()
    engine = Engine(m)
    number = engine.add_request(list(range(3, 30)), SamplingParams(temperature=0, max_tokens=8))
    tokens = []
    for step in range(40):
        for event in engine.step():
            tokens += event.token_ids
            done = event.completion
        if step == 3:
            with torch.no_grad():
                m.lm_head.weight.neg_()
            kept = list(tokens)
        if done is not None:
            break
    assert number is not None and done.token_ids[: len(kept)] == kept
    rest = Engine(m).generate(
        [[*range(3, 30), *kept]], SamplingParams(temperature=0, max_tokens=8 - len(kept))
    )
    assert done.token_ids[len(kept) :] == rest[0].token_ids


def test_wrapped_models_are_found_inside_their_wraps():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    m = model()
    plain = Engine(m).generate([[3, 4, 5]], GREEDY)[0].token_ids
    assert Engine(torch.compile(m)).generate([[3, 4, 5]], GREEDY)[0].token_ids == plain
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    lora = peft.get_peft_model(m, settings)
    got = Engine(lora).generate([[3, 4, 5]], GREEDY)[0].token_ids
    lora.eval()
    want = lora.generate(input_ids=torch.tensor([[3, 4, 5]]), max_new_tokens=6, do_sample=False)
    assert got == want[0, 3:].tolist() != plain
    virtual = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ValueError, match=r"PromptTuningConfig adds virtual tokens.*use LoRA"):
        Engine(peft.get_peft_model(model(), virtual))


@pytest.fixture
def no_accelerator():
    """Accelerate keeps one precision per process, even one that another test set."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()


def test_a_forward_wrapped_for_mixed_precision_is_computed_as_in_training(no_accelerator):
    from accelerate import Accelerator

    m = Accelerator(mixed_precision="bf16", cpu=True).prepare(model())
    before = trace_of(m)
    engine = Engine(m)
    got = engine.generate([[3, 4, 5]], GREEDY)[0].token_ids
    assert trace_of(m) == before
    assert engine._executor.runner.cache.layer(0)[0].dtype == torch.bfloat16
    assert got == Engine(model(), dtype=torch.bfloat16).generate([[3, 4, 5]], GREEDY)[0].token_ids


def test_the_current_device_is_the_models_while_it_is_borrowed(monkeypatch):
    """Regression: kernels were launched on the first GPU with data of another one."""
    current = [torch.device("cuda", 0)]

    @contextmanager
    def switched(device):
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", switched)
    monkeypatch.setattr(borrow, "preserve_rng", nullcontext)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    second = torch.device("cuda", 1)
    placed: Any = torch.nn.Module()
    placed.parameters = lambda: iter([SimpleNamespace(device=second)])
    with borrow.borrow_model(placed, modules=[]):
        assert current[-1] == second
    assert current == [torch.device("cuda", 0)]
