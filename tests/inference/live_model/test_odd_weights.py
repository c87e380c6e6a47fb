"""8-bit weights, models on several devices, and systems that do not report free memory."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from nopad.inference import Engine, SamplingParams
from nopad.inference.live_model.weights_version import WeightsVersion

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
