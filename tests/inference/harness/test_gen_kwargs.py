"""What a task does not ask for is taken from the model's generation_config, or refused."""

from __future__ import annotations

import pytest
from nopad.inference.harness.gen_kwargs import check_defaults, settle
from nopad.inference.requests.sampling_params import SamplingParams
from transformers import GenerationConfig

GREEDY = {"do_sample": False, "temperature": 0.0}
WARM = {"do_sample": True, "temperature": 0.7}


def test_what_is_drawn_from_is_the_models_wish_where_the_task_has_none():
    assert settle(WARM, GenerationConfig()) == {"temperature": 0.7, "top_k": 50}
    own = GenerationConfig(do_sample=True, temperature=0.3, top_k=20, top_p=0.8, min_p=0.1)
    wanted = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1}
    assert settle(WARM, own) == wanted
    assert settle({**WARM, "top_k": 0, "top_p": 1.0}, own) == wanted | {"top_k": 0, "top_p": 1.0}
    assert settle(GREEDY, own) == {"temperature": 0.0}, "they play no part"


def test_a_penalty_of_the_model_holds_without_draws_too():
    own = GenerationConfig(repetition_penalty=1.2)
    assert settle(GREEDY, own) == {"temperature": 0.0, "repetition_penalty": 1.2}
    assert SamplingParams(**settle(GREEDY, own)).has_penalties


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("no_repeat_ngram_size", 2),
        ("suppress_tokens", [5, 6]),
        ("bad_words_ids", [[7]]),
        ("min_new_tokens", 3),
        ("num_beams", 4),
        ("guidance_scale", 1.5),
    ],
)
def test_a_setting_of_the_model_that_we_do_not_have_is_refused_with_the_way_out(name, value):
    own = GenerationConfig(**{name: value})
    way_out = f"sets {name} to .* model.generation_config.{name} = None"
    with pytest.raises(ValueError, match=way_out):
        check_defaults(own)
    with pytest.raises(ValueError, match=way_out):
        settle(GREEDY, own)


def test_settings_that_change_nothing_are_taken():
    check_defaults(None)
    check_defaults(GenerationConfig())
    check_defaults(GenerationConfig(num_beams=1, min_length=0, suppress_tokens=[]))
    check_defaults(GenerationConfig(max_length=4096, eos_token_id=[1, 2], pad_token_id=0))


def test_what_only_changes_draws_is_refused_only_for_draws():
    own = GenerationConfig(typical_p=0.9)
    assert settle(GREEDY, own) == {"temperature": 0.0}
    with pytest.raises(ValueError, match="sets typical_p to 0"):
        settle(WARM, own)
