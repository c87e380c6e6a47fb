"""The engine's log-probabilities of its own tokens are those of the packed training forward."""

from __future__ import annotations

import random

import pytest
import torch
from nopad.inference import Engine, SamplingParams, agreement, invariant
from nopad.inference.logprob_parity import LogprobParityEval


def prompts(count: int = 12) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, 97) for _ in range(rng.randint(1, 40))] for _ in range(count)]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_generation_computes_what_training_computes(tiny, family):
    model = tiny(family)
    found = agreement(model, Engine(model), prompts(), new=10)
    assert found.tokens == 120 and found.dtype == "float32"
    assert found.largest < 1e-4, str(found)


def test_under_autocast_both_compute_in_the_narrow_dtype(tiny):
    model = tiny("llama")
    with torch.autocast("cpu", torch.bfloat16):
        found = agreement(model, Engine(model), prompts(4), new=4)
    assert found.dtype == "bfloat16" and found.mean < 0.2


def test_other_weights_are_noticed(tiny, monkeypatch):
    from nopad.inference import logprob_parity as module

    model = tiny("llama")
    original = module.packed_logprobs

    def after_a_step(live, asked, made):
        with torch.no_grad():
            live.lm_head.weight.mul_(1.05)
        try:
            return original(live, asked, made)
        finally:
            with torch.no_grad():
                live.lm_head.weight.div_(1.05)

    monkeypatch.setattr(module, "packed_logprobs", after_a_step)
    assert agreement(model, Engine(model), prompts(4), new=4).largest > 1e-3


def test_as_an_evaluation_it_gives_metrics_and_leaves_no_trace(tiny):
    from nopad.trainer.evaluation import GenerationEval

    model = tiny("llama").train()
    state = torch.get_rng_state()
    check = LogprobParityEval(model, Engine(model), prompts(3), new=4)
    report = GenerationEval(check, name="agreement").run(5, model)
    assert report.error is None and report.metrics["eval/agreement/largest"] < 1e-4
    assert report.metrics["eval/agreement/tokens"] == 12
    assert model.training and torch.equal(state, torch.get_rng_state())


def test_a_prompt_that_cannot_run_is_named(tiny):
    model = tiny("llama")
    with pytest.raises(ValueError, match="prompt 1: the prompt has 300 tokens"):
        agreement(model, Engine(model), [[3], [4] * 300])


@pytest.mark.parametrize("settings", [{}, {"max_num_seqs": 3, "max_num_batched_tokens": 20}])
def test_without_rounding_by_company_the_difference_is_exactly_nothing(tiny, settings):
    model = tiny("llama")
    plain = agreement(model, Engine(model, **settings), prompts(), new=10)
    with invariant(longest=64):
        found = agreement(model, Engine(model, **settings), prompts(), new=10)
    assert found.tokens == plain.tokens and found.largest == 0.0, str(found)


def test_invariant_arithmetic_refuses_sequences_it_was_not_told_of(tiny):
    model = tiny("llama")
    with invariant(longest=8), pytest.raises(ValueError, match="raise longest=8"):
        Engine(model).generate([list(range(3, 20))], SamplingParams(max_tokens=2))
