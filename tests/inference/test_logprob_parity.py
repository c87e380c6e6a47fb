"""The engine's log-probabilities of its own tokens are those of the packed training forward."""

from __future__ import annotations

import random

import pytest
import torch
from nopad.inference import Engine, SamplingParams, batch_invariant, compare_logprobs
from nopad.inference.logprob_parity import LogprobParityEval


def prompts(count: int = 12) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, 97) for _ in range(rng.randint(1, 40))] for _ in range(count)]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_generation_computes_what_training_computes(tiny, family):
    model = tiny(family)
    parity = compare_logprobs(model, Engine(model), prompts(), max_tokens=10)
    assert parity.num_tokens == 120 and parity.dtype == "float32"
    assert parity.max < 1e-4, str(parity)


def test_under_autocast_both_compute_in_the_narrow_dtype(tiny):
    model = tiny("llama")
    with torch.autocast("cpu", torch.bfloat16):
        parity = compare_logprobs(model, Engine(model), prompts(4), max_tokens=4)
    assert parity.dtype == "bfloat16" and parity.mean < 0.2


def test_other_weights_are_noticed(tiny, monkeypatch):
    from nopad.inference import logprob_parity as module

    model = tiny("llama")
    original = module.packed_logprobs

    def after_a_step(live, prompts, completions):
        with torch.no_grad():
            live.lm_head.weight.mul_(1.05)
        try:
            return original(live, prompts, completions)
        finally:
            with torch.no_grad():
                live.lm_head.weight.div_(1.05)

    monkeypatch.setattr(module, "packed_logprobs", after_a_step)
    assert compare_logprobs(model, Engine(model), prompts(4), max_tokens=4).max > 1e-3


def test_as_an_evaluation_it_gives_metrics_and_leaves_no_trace(tiny):
    from nopad.trainer.evaluation import GenerationEval

    model = tiny("llama").train()
    state = torch.get_rng_state()
    check = LogprobParityEval(model, Engine(model), prompts(3), max_tokens=4)
    report = GenerationEval(check, name="parity").run(5, model)
    assert report.error is None and report.metrics["eval/parity/max"] < 1e-4
    assert report.metrics["eval/parity/tokens"] == 12
    assert model.training and torch.equal(state, torch.get_rng_state())


def test_a_prompt_that_cannot_run_is_named(tiny):
    model = tiny("llama")
    with pytest.raises(ValueError, match="prompt 1: the prompt has 300 tokens"):
        compare_logprobs(model, Engine(model), [[3], [4] * 300])


@pytest.mark.parametrize("settings", [{}, {"max_num_seqs": 3, "max_num_batched_tokens": 20}])
def test_without_rounding_by_company_the_difference_is_exactly_nothing(tiny, settings):
    model = tiny("llama")
    plain = compare_logprobs(model, Engine(model, **settings), prompts(), max_tokens=10)
    with batch_invariant(max_length=64):
        parity = compare_logprobs(model, Engine(model, **settings), prompts(), max_tokens=10)
    assert parity.num_tokens == plain.num_tokens and parity.max == 0.0, str(parity)


def test_invariant_arithmetic_refuses_sequences_it_was_not_told_of(tiny):
    model = tiny("llama")
    with batch_invariant(max_length=8), pytest.raises(ValueError, match="raise max_length=8"):
        Engine(model).generate([list(range(3, 20))], SamplingParams(max_tokens=2))
