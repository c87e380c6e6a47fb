"""The engine reads a model's generation_config at each call, and refuses what it does not do."""

from __future__ import annotations

import copy

import pytest
from nopad.inference import Engine

GREEDY = {"temperature": 0, "max_tokens": 6}
UNSUPPORTED = {
    "num_beams": 4, "suppress_tokens": [5], "no_repeat_ngram_size": 2, "bad_words_ids": [[5]],
    "sequence_bias": {(5,): 1.0}, "forced_eos_token_id": 2, "min_new_tokens": 3,
}  # fmt: skip


@pytest.fixture
def model(tiny):
    return copy.deepcopy(tiny("llama"))


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_setting_that_the_engine_does_not_do_is_refused_at_each_call(model, name):
    engine = Engine(model)
    (want,) = engine.generate([[5, 6]], GREEDY)
    setattr(model.generation_config, name, UNSUPPORTED[name])
    for call in (engine.generate, engine.stream):
        with pytest.raises(ValueError, match=f"sets {name} to .*generation_config.{name} = None"):
            call([[5, 6]], GREEDY)
    with pytest.raises(ValueError, match=f"sets {name} to "):
        engine.add_request([5, 6], GREEDY)
    setattr(model.generation_config, name, None)
    assert engine.generate([[5, 6]], GREEDY) == [want]


def test_what_only_changes_draws_is_refused_only_for_draws(model):
    engine = Engine(model)
    model.generation_config.typical_p = 0.9
    assert engine.generate([[5, 6]], GREEDY)[0].error is None
    with pytest.raises(ValueError, match="sets typical_p"):
        engine.generate([[5, 6]], {"temperature": 1.0})


def test_the_end_of_a_text_is_read_at_each_call(model):
    engine = Engine(model)
    (whole,) = engine.generate([[5, 6]], GREEDY)
    assert whole.finish_reason == "length"
    model.generation_config.eos_token_id = [2, whole.token_ids[2]]
    (ended,) = engine.generate([[5, 6]], GREEDY)
    assert ended.finish_reason == "stop" and ended.token_ids == whole.token_ids[:3]
