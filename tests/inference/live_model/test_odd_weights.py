"""8-bit weights, models on several devices, and systems that do not report free memory."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from nopad.inference import Engine, SamplingParams
from nopad.inference.live_model.weights_version import WeightsVersion
from nopad.inference.scheduling.cache_checker import check_scheduler

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


def test_floats_of_one_byte_beside_wider_ones_are_watched():
    narrow = torch.nn.Parameter(torch.ones(40).to(torch.float8_e4m3fn), requires_grad=False)
    wide = torch.nn.Parameter(torch.ones(40, dtype=torch.bfloat16))
    model = torch.nn.ParameterList([narrow, wide])
    version = WeightsVersion(model)
    assert version.refresh() and not version.refresh()
    narrow.data.view(torch.uint8)[7] += 1
    assert version.refresh() and not version.refresh()


def test_a_model_spread_over_devices_is_refused_in_one_line(tiny):
    model = copy.deepcopy(tiny("llama"))
    model.model.layers[1].to("meta")
    with pytest.raises(ValueError, match=r"is on cpu, meta: .* one device"):
        Engine(model).generate([[3]], GREEDY)


def test_where_free_memory_is_not_told_the_engine_still_runs(tiny, monkeypatch):
    def unavailable(name):
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(os, "sysconf", unavailable)
    assert len(Engine(tiny("llama")).generate([[3]], GREEDY)[0].token_ids) == 3


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["lm_head", "model.layers.0.mlp.down_proj"])
def test_logits_that_are_not_numbers_are_told_by_every_call(tiny, value, where):
    model = copy.deepcopy(tiny("llama"))
    with torch.no_grad():
        model.get_submodule(where).weight[5] = value
    engine = Engine(model, page_size=16)
    told = "the model's logits are not numbers (NaN or infinite)"
    sampled = SamplingParams(temperature=1.0, max_tokens=3, prompt_logprobs=0)
    assert [c.error for c in engine.generate([[3, 4], [6, 7]], sampled)] == [told] * 2
    scores = engine.score([[3, 4], [6]], [[5], [[5], [6, 7]]])
    assert [scores[0].error, *(s.error for s in scores[1])] == [told] * 3
    assert not scores[0].is_greedy and scores[0].logprob != scores[0].logprob
    assert engine.score_rolling([[3, 4, 5, 6]])[0].error == told
    check_scheduler(engine._loop.scheduler)


def test_a_request_beside_one_that_is_not_a_number_is_scored(tiny):
    model = copy.deepcopy(tiny("llama"))
    (want,) = Engine(model).score([[3, 4]], [[6]])
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = float("nan")
    good, bad = Engine(model, page_size=16).score([[3, 4], [3, 5]], [[6], [6]])
    assert bad.error and good.error is None
    assert good.logprob == pytest.approx(want.logprob, abs=1e-5)


def test_an_impossible_token_is_a_score_and_not_a_fault(tiny):
    """A vocabulary padded by logits of minus infinity has tokens of probability zero."""
    model = copy.deepcopy(tiny("llama"))

    def forbid(module, args, logits):
        logits[..., 90:] = -torch.inf
        return logits

    model.lm_head.register_forward_hook(forbid)
    possible, never = Engine(model).score([[3, 4], [3, 4]], [[6], [95]])
    assert possible.error is None and possible.logprob > -float("inf")
    assert never.error is None and never.logprob == -float("inf")
