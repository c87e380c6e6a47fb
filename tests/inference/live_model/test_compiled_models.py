"""A model that is compiled for training generates as it does without: it runs eagerly."""

from __future__ import annotations

import copy

import pytest
import torch
from nopad.inference import Engine
from nopad.trainer import compile_layers
from nopad.trainer.evaluation import Example, GenerationEval

GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
PROMPTS = [[5, 6, 7], list(range(10, 40))]


def compile_in_place(model):
    model.compile(backend="eager")


def compile_the_layers(model):
    compile_layers(model, backend="eager")


def wrap_the_layers(model):
    layers = model.model.layers
    for index in range(len(layers)):
        layers[index] = torch.compile(layers[index], backend="eager")


def compile_the_forward(model):
    model.forward = torch.compile(model.forward, backend="eager")


def compile_an_attention(model):
    model.model.layers[1].self_attn.compile(backend="eager")


WAYS = [
    compile_in_place, compile_the_layers, wrap_the_layers, compile_the_forward,
    compile_an_attention,
]  # fmt: skip


@pytest.mark.parametrize("how", WAYS, ids=lambda how: how.__name__)
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_a_compiled_model_generates_as_before(tiny, how, family):
    model = copy.deepcopy(tiny(family)).train()
    if family == "gpt_oss" and how is not compile_in_place:
        pytest.skip(reason="the ways differ in what is compiled, not in the family")
    want = Engine(model).generate(PROMPTS, GREEDY)
    scores = Engine(model).score(PROMPTS, [[8], [9]])
    before = Engine(model)
    before.generate(PROMPTS, GREEDY)
    how(model)
    attributes = [dict(vars(module)) for module in model.modules()]
    for engine in (before, Engine(model)):
        assert engine.generate(PROMPTS, GREEDY) == want
        assert engine.score(PROMPTS, [[8], [9]]) == scores
    assert [dict(vars(module)) for module in model.modules()] == attributes
    evaluation = GenerationEval(before.generate, [Example([5, 6, 7])], {}, GREEDY)
    report = evaluation.run(0, model)
    assert report.error is None and report.metrics["eval/new_tokens"] == 6
