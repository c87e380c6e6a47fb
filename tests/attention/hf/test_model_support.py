"""Which models keep a state or drop keyword arguments; only the latter get a forward context."""

import importlib
import inspect
import re

import pytest
import torch
from nopad.attention import Varlen, layer_shapes, unsupported_reason
from nopad.attention.hf import (
    current_varlen,
    drops_kwargs,
    forward_context,
    packed_batch,
    random_documents,
    stateful_parts,
    step_context,
)
from nopad.attention.hf.model_support import keeps_state
from nopad.attention.hf.model_types import refuse_unsupported
from nopad.cli.tiny_model import randomize_weights, tiny_config, tiny_model
from nopad.inference import Engine, SamplingParams
from odd_models import odd_model
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


STATEFUL = (
    "falcon_h1",
    "jamba",
    "bamba",
    "granitemoehybrid",
    "minimax",
    "qwen3_next",
    "kimi_linear",
)


@pytest.mark.parametrize("kind", STATEFUL)
def test_a_state_beside_attention_is_seen_by_what_it_does(kind):
    model = tiny(kind, "eager").train()
    assert keeps_state(model)
    assert model.training and model.config._attn_implementation == "eager"


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_oss", "mixtral", "deepseek_v3", "nemotron"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_only_attend_keep_no_state(kind, dtype):
    assert not keeps_state(tiny(kind, "eager").to(dtype))


def test_a_model_has_the_same_reason_after_another_forward_was_bound_to_it():
    """A trainer that failed leaves its loss on the model, and the engine looks for autocast."""
    told = []
    for prepared in (False, True):
        model = tiny("recurrent_gemma", "eager")
        if prepared:
            model.forward = model.forward
        with pytest.raises(ValueError, match="cannot run this model") as error:
            Engine(model).generate([[1, 2, 3]], SamplingParams(max_tokens=2))
        told.append(str(error.value))
    assert told[0] == told[1]


def test_a_layer_of_unknown_name_that_mixes_tokens_is_refused():
    class Shift(torch.nn.Module):  # as a user may add to any model
        def forward(self, x):
            return x + x.roll(1, dims=1)

    model = tiny("llama", "eager")
    model.model.layers[1].mlp = torch.nn.Sequential(model.model.layers[1].mlp, Shift())
    assert "carries a state from token to token" in unsupported_reason(model)
    with pytest.raises(ValueError, match="nopad cannot run this model: llama carries a state"):
        Engine(model).generate([[3, 4, 5]])


def test_a_state_is_found_even_where_weights_hide_it():
    model = odd_model("stateful").to(torch.bfloat16)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1e-3)
    assert re.search("falcon_h1 .*state beside attention", unsupported_reason(model) or "")
    assert unsupported_reason(model, states=True) is None
    assert len(stateful_parts(model)) == model.config.num_hidden_layers
    for run in (lambda e: e.generate([[3, 4, 5]]), lambda e: e.score([[3, 4]], [[5]])):
        assert run(Engine(model))[0].error is None


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("recurrent_gemma", "state from token to token"), ("zamba2", "block for several layers")],
)
def test_states_outside_a_cache_and_shared_attention_are_refused(kind, reason):
    model, _ = tiny_model(CONFIG_MAPPING[kind](), every_kind=True, attn_implementation="eager")
    assert reason in (unsupported_reason(model, states=True) or "")
    with pytest.raises(ValueError, match=reason):
        Engine(model).generate([[3, 4, 5]])


def test_what_cannot_be_examined_is_refused(monkeypatch):
    model = tiny("llama", "eager")
    forward = type(model).forward

    def moody(self, input_ids=None, **named):
        if input_ids.shape[1] > 1:
            raise KeyError("no more than one token")
        return forward(self, input_ids=input_ids, **named)

    moody.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(type(model), "forward", moody)
    assert "llama cannot be examined (KeyError" in unsupported_reason(model)


def test_a_compiled_model_is_probed_in_eager_mode():
    model = tiny("llama", "eager")
    model.compile(backend="eager")
    assert not keeps_state(model) and layer_shapes(model) == [(4, 16, 16)] * 2


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


def test_models_of_two_threads_do_not_read_each_other_s_context():
    """The steps of two engines overlap, and the first one to begin may be the first to end."""
    models = tiny("stablelm"), tiny("nemotron")
    layers = [model.model.layers[0].self_attn for model in models]
    own = VARLEN, Varlen(torch.tensor([0, 1], dtype=torch.int32), 1)
    contexts = [step_context(model, varlen) for model, varlen in zip(models, own, strict=True)]
    for context in contexts:
        context.__enter__()
    assert [current_varlen(layer) for layer in layers] == [*own]
    contexts[0].__exit__(None, None, None)
    assert [current_varlen(layer) for layer in layers] == [None, own[1]]
    contexts[1].__exit__(None, None, None)
    assert current_varlen(layers[1]) is None


@pytest.mark.parametrize("kind", ["llama", "stablelm"])
def test_a_context_is_pushed_only_where_keywords_are_dropped(kind, monkeypatch):
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


REFUSED = {
    "bloom": "attention interface", "codegen": "attention interface", "roberta": "pad_token_id",
    "bart": "position_ids", "deepseek_v32": "index",
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_types_that_would_ignore_the_name_are_refused_at_the_first_forward(kind):
    with pytest.raises(ValueError, match=f'"nopad" cannot serve this model: .*{REFUSED[kind]}'):
        tiny(kind, "nopad")(input_ids=torch.arange(1, 9)[None], use_cache=False)


@pytest.mark.parametrize("kind", ["minimax", "falcon_h1"])
def test_states_that_nothing_resets_are_refused_in_packs_alone(kind):
    model = tiny(kind, "nopad")
    model(input_ids=torch.arange(1, 9)[None], use_cache=False)
    batch = packed_batch(random_documents(model))
    with pytest.raises(ValueError, match=r"keeps a .* state .*attach_loss\(model\) first"):
        model(**batch)


def test_a_hybrid_type_whose_layers_all_attend_is_served():
    settings = {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}
    model = AutoModelForCausalLM.from_config(
        tiny_config(CONFIG_MAPPING["granitemoehybrid"](**settings)), attn_implementation="nopad"
    )
    assert unsupported_reason(model) is None


def test_a_model_with_a_vision_tower_of_another_kind_is_served():
    config = tiny_config(CONFIG_MAPPING["llava"]())
    refuse_unsupported(config)
    refuse_unsupported(config.vision_config)
