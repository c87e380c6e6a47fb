"""Sampling parameters: numbers of any library are accepted, invalid values are rejected."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from nopad.inference import Engine, SamplingParams

HUGE = 2**70
GREEDY = {"temperature": 0, "max_tokens": 3, "ignore_eos": True}


@pytest.mark.parametrize(
    "value", [{"logit_bias": [1]}, {"logit_bias": {1: "a"}}, {"logit_bias": {"a": 1.0}},
              {"logit_bias": {5: 1e300}}, {"logit_bias": {5: float("nan")}},
              {"repetition_penalty": 1e-300}, {"presence_penalty": -1e300},
              {"temperature": 1e39}, {"ignore_eos": "no"}, {"stop": 5}, {"stop_token_ids": [1.5]}],
)  # fmt: skip
def test_a_setting_that_cannot_be_is_named(tiny, value):
    with pytest.raises(ValueError, match=next(iter(value))) as refused:
        Engine(tiny("llama")).generate([[3, 4], [5, 6]], [GREEDY, GREEDY | value])
    assert "\n" not in str(refused.value)


def test_a_count_beyond_the_vocabulary_means_all_of_it(tiny):
    engine = Engine(tiny("llama"))
    hot = {"temperature": 1.0, "max_tokens": 3, "ignore_eos": True, "seed": 1}
    for_all, all_of_it = engine.generate([[3, 4]] * 2, [hot, hot | {"top_k": HUGE}])
    assert all_of_it == for_all
    (many,) = engine.generate([[3, 4]], GREEDY | {"logprobs": HUGE, "prompt_logprobs": HUGE})
    assert [len(entry.top_logprobs) for entry in many.logprobs] == [97] * 3
    assert len(many.prompt_logprobs[1].top_logprobs) == 97


@pytest.mark.parametrize("number", [np.asarray, np.float64, np.float32, torch.tensor])
def test_numbers_of_numpy_and_torch_are_numbers(number):
    whole = np.int64 if isinstance(number, type) else number
    given = SamplingParams(
        temperature=number(0.5), top_p=number(0.25), max_tokens=whole(3), seed=whole(7),
        logprobs=whole(2), stop_token_ids=[whole(4)], logit_bias={5: number(1.5)},
    )  # fmt: skip
    plain = SamplingParams(
        temperature=0.5, top_p=0.25, max_tokens=3, seed=7,
        logprobs=2, stop_token_ids=[4], logit_bias={5: 1.5},
    )  # fmt: skip
    assert repr(given) == repr(plain)


def test_what_is_no_number_is_not_taken_for_one():
    for value in (np.bool_(True), np.array([3]), "3", 2.5, np.float32(2.5)):
        with pytest.raises(ValueError, match="max_tokens is "):
            SamplingParams(max_tokens=value)


def test_none_means_no_stops_and_no_bias():
    given = SamplingParams(stop=None, stop_token_ids=None, logit_bias=None)
    assert given == SamplingParams()


def test_an_end_token_beyond_the_vocabulary_is_no_end(tiny):
    model = tiny("llama")
    before, model.generation_config.eos_token_id = model.generation_config.eos_token_id, [2, 500]
    try:
        held = {"temperature": 0, "max_tokens": 4, "min_tokens": 3}
        (done,) = Engine(model).generate([[3, 4]], held)
    finally:
        model.generation_config.eos_token_id = before
    assert done.error is None and len(done.token_ids) >= 3
