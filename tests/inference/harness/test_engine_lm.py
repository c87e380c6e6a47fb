"""Settings that a task does not give come from the model's generation_config, or are refused."""

from __future__ import annotations

import pytest
from nopad.inference.harness.engine_lm import check_generation_config, to_sampling_kwargs
from nopad.inference.requests.sampling_params import SamplingParams
from transformers import GenerationConfig

GREEDY = {"do_sample": False, "temperature": 0.0}
WARM = {"do_sample": True, "temperature": 0.7}


def test_what_is_drawn_from_is_the_models_wish_where_the_task_has_none():
    assert to_sampling_kwargs(WARM, GenerationConfig()) == {"temperature": 0.7, "top_k": 50}
    config = GenerationConfig(do_sample=True, temperature=0.3, top_k=20, top_p=0.8, min_p=0.1)
    expected = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1}
    assert to_sampling_kwargs(WARM, config) == expected
    assert to_sampling_kwargs({**WARM, "top_k": 0, "top_p": 1.0}, config) == expected | {
        "top_k": 0,
        "top_p": 1.0,
    }
    assert to_sampling_kwargs(GREEDY, config) == {"temperature": 0.0}, "they have no effect"


def test_a_penalty_of_the_model_holds_without_draws_too():
    config = GenerationConfig(repetition_penalty=1.2)
    assert to_sampling_kwargs(GREEDY, config) == {"temperature": 0.0, "repetition_penalty": 1.2}
    assert SamplingParams(**to_sampling_kwargs(GREEDY, config)).has_penalties


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
def test_a_model_setting_that_we_lack_is_refused(name, value):
    config = GenerationConfig(**{name: value})
    way_out = f"sets {name} to .* model.generation_config.{name} = None"
    with pytest.raises(ValueError, match=way_out):
        check_generation_config(config)
    with pytest.raises(ValueError, match=way_out):
        to_sampling_kwargs(GREEDY, config)


def test_settings_that_change_nothing_are_taken():
    check_generation_config(None)
    check_generation_config(GenerationConfig())
    check_generation_config(GenerationConfig(num_beams=1, min_length=0, suppress_tokens=[]))
    check_generation_config(GenerationConfig(max_length=4096, eos_token_id=[1, 2], pad_token_id=0))


def test_what_only_changes_draws_is_refused_only_for_draws():
    config = GenerationConfig(typical_p=0.9)
    assert to_sampling_kwargs(GREEDY, config) == {"temperature": 0.0}
    with pytest.raises(ValueError, match="sets typical_p to 0"):
        to_sampling_kwargs(WARM, config)
