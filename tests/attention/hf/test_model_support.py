"""Which models drop keyword arguments, and that only those get a forward context."""

import importlib

import pytest
import torch
from nopad.attention import Varlen, layer_shapes
from nopad.attention.hf import current_varlen, drops_kwargs, forward_context, step_context
from nopad.cli.tiny_model import randomize_weights, tiny_config
from nopad.inference import Engine, SamplingParams
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

module = importlib.import_module("nopad.attention.hf.forward_context")
VARLEN = Varlen(torch.tensor([0, 3], dtype=torch.int32), 3)
DROPPING = {"llama": False, "gpt2": False, "mistral": False, "nemotron": True, "stablelm": True}


def tiny(kind, attention="nopad"):
    model = AutoModelForCausalLM.from_config(
        tiny_config(CONFIG_MAPPING[kind]()), attn_implementation=attention
    )
    randomize_weights(model)
    return model.eval()


@pytest.mark.parametrize("kind", DROPPING)
@pytest.mark.parametrize("attention", ["nopad", "eager"])
def test_models_that_drop_keyword_arguments_are_detected(kind, attention):
    model = tiny(kind, attention)
    assert drops_kwargs(model) is DROPPING[kind]
    assert model.config._attn_implementation == attention


def test_a_model_is_probed_once(monkeypatch):
    model = tiny("nemotron")
    layer_shapes(model)
    monkeypatch.setattr(model, "forward", lambda **_: pytest.fail("probed again"))
    assert drops_kwargs(model) and drops_kwargs(model)


@pytest.mark.parametrize("kind", ["llama", "nemotron"])
def test_only_a_model_that_needs_it_gets_a_context(kind):
    with step_context(tiny(kind), VARLEN):
        assert current_varlen() is (VARLEN if DROPPING[kind] else None)
    assert current_varlen() is None


def test_contexts_nest():
    inner = Varlen(torch.tensor([0, 1], dtype=torch.int32), 1)
    with forward_context(VARLEN):
        with forward_context(inner):
            assert current_varlen() is inner
        assert current_varlen() is VARLEN


@pytest.mark.parametrize("kind", ["llama", "stablelm"])
def test_engine_steps_push_a_context_only_for_models_that_drop_keyword_arguments(kind, monkeypatch):
    pushed = []

    class Contexts(list):
        def append(self, varlen):
            pushed.append(varlen)
            super().append(varlen)

    monkeypatch.setattr(module, "_contexts", Contexts())
    model = tiny(kind, "eager")
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    (completion,) = Engine(model).generate([[3, 4, 5, 6]], params)
    assert completion.error is None and len(pushed) == (4 if DROPPING[kind] else 0)
