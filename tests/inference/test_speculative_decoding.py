"""An engine with `speculate` gives what one without gives, for every parameter (B26)."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from fake_tokenizer import FakeTokenizer
from nopad.attention import PagedCache, layer_shapes
from nopad.inference import Engine, SamplingParams, batch_invariant, settings
from nopad.inference.requests.draws import Draws

TOKENIZER = FakeTokenizer(eos_token_id=0, bos_token_id=1, hidden=3, to_byte=lambda t: t % 64 + 32)
LONG = {"max_tokens": 24}
FEW_TOKENS = {"logit_bias": dict.fromkeys((33, 34, 35, 5), 40.0)}
"""Texts of A, B, C and %, which repeat themselves."""
PARAMS = {
    "greedy": {"temperature": 0},
    "drawn": {"seed": 1, "n": 3},
    "unseeded": {"n": 2},
    "filters": {"seed": 2, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "temperature": 0.7},
    "penalties": {
        "temperature": 0, "presence_penalty": 1.0, "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
    },
    "drawn with penalties": {"seed": 3, "frequency_penalty": 2.0, "repetition_penalty": 1.3},
    "bias": {"temperature": 0, "logit_bias": {5: 9.0, 7: -9.0}},
    "stop tokens late": {"seed": 4, "stop_token_ids": list(range(3, 40)), "min_tokens": 9},
    "stop strings": {"seed": 5, "stop": ["A-", "BCB", "CA"], "min_tokens": 2},
    "end of text and stop strings": {"seed": 6, "stop": ["AB", *"DEFGH"], "stop_token_ids": [9, 5]},
    "log-probabilities": {"temperature": 0, "logprobs": 3, "prompt_logprobs": 1},
    "processed": {"seed": 7, "logprobs": 2, "logprobs_mode": "processed", "presence_penalty": 1.0},
}  # fmt: skip


def prompts(count: int = 5) -> list[list[int]]:
    """Prompts that share beginnings and repeat themselves."""
    rng = random.Random(0)
    stem = [rng.randrange(3, 97) for _ in range(6)]
    return [stem * 4 + [rng.randrange(3, 97) for _ in range(i)] + stem[:3] for i in range(count)]


def contents(completions) -> list:
    """All of completions but log-probabilities, which rounding changes."""
    every = [each for c in completions for each in (c, *c.others)]
    assert all(c.error is None for c in every)
    return [(c.token_ids, c.text, c.finish_reason) for c in every]


def logprobs(completions) -> list[tuple[int, float]]:
    every = [each for c in completions for each in (c, *c.others)]
    entries = [t for c in every for t in (*(c.logprobs or ()), *(c.prompt_logprobs or ())) if t]
    return [
        item for t in entries for item in [(t.token_id, t.logprob), *sorted(t.top_logprobs.items())]
    ]


def page_bytes(model) -> int:
    return PagedCache.bytes_per_page(layer_shapes(model), 16, torch.float32)


SOURCES = ("ngram", "history")
EACH_CASE = [
    pytest.param(case, source, marks=[pytest.mark.slow] if (number + place) % 2 else [])
    for number, case in enumerate(PARAMS)
    for place, source in enumerate(SOURCES)
]
"""Of a parameter, a fast run has one source; `test_all_parameters_at_once` has both."""


@pytest.mark.parametrize(("case", "source"), EACH_CASE)
def test_completions_are_those_without(always, tiny, case, source):
    model, few = tiny("llama"), FEW_TOKENS if source == "ngram" else {}
    params = SamplingParams(**LONG | few | PARAMS[case])
    plain = Engine(model, TOKENIZER, page_size=16)
    engine = Engine(model, TOKENIZER, page_size=16, speculate=source, debug=True)
    for call in range(2):
        draws = Draws("same numbers", call)
        want = plain.generate(prompts(), params, _draws=draws)
        got = engine.generate(prompts(), params, _draws=draws)
        assert contents(got) == contents(want)
        ours, theirs = logprobs(got), logprobs(want)
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        np.testing.assert_allclose([p for _, p in ours], [p for _, p in theirs], atol=2e-4)
        assert engine.stats.new_tokens == plain.stats.new_tokens
    stats = engine.stats
    # Other texts repeat themselves by chance; unseeded ones are drawn afresh.
    if case == "greedy" or (source == "history" and case != "unseeded"):
        assert stats.accepted_tokens > 0 and stats.steps < plain.stats.steps


@pytest.mark.parametrize("source", ["ngram", "history"])
def test_all_parameters_at_once_in_few_pages_and_small_chunks(always, tiny, source):
    model = tiny("llama")
    params = [SamplingParams(**LONG | FEW_TOKENS | more) for more in PARAMS.values()]
    asked = prompts(len(params))
    draws = Draws("same numbers", 0)
    want = Engine(model, TOKENIZER, page_size=16).generate(asked, params, _draws=draws)
    engine = Engine(
        model, TOKENIZER, page_size=16, memory=page_bytes(model) * 13, max_num_seqs=7,
        max_num_batched_tokens=20, speculate=source, debug=True,
    )  # fmt: skip
    for _ in range(2):
        assert contents(engine.generate(asked, params, _draws=draws)) == contents(want)
    assert engine.stats.preemptions > 0 and engine.stats.accepted_tokens > 0
    assert engine.stats.prefix_hit_tokens > 0


def test_other_weights_make_a_bad_draft_and_not_a_wrong_answer(always, tiny):
    model = copy.deepcopy(tiny("llama"))
    engine = Engine(model, page_size=16, speculate="history", debug=True)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    rates = []
    for noise in (0.0, 0.0, 0.02, 2.0):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += noise * parameter.std() * torch.randn_like(parameter)
        engine.stats.reset()
        got = engine.generate(prompts(), params)
        assert contents(got) == contents(Engine(model, page_size=16).generate(prompts(), params))
        rates.append(engine.stats.acceptance_rate)
    assert rates[0] == 0 and rates[1] == 1 and rates[3] < rates[1]


def test_earlier_completions_survive_a_release(always, tiny):
    engine = Engine(tiny("llama"), page_size=16, speculate="history", keep_memory=False)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    first = engine.generate(prompts(), params)
    assert engine._executor is None and engine.stats.drafted_tokens == 0
    assert engine.generate(prompts(), params) == first and engine.stats.acceptance_rate == 1


@pytest.mark.parametrize("source", ["ngram", "history"])
def test_in_batch_invariant_mode_the_log_probabilities_are_the_same_bits(always, tiny, source):
    params = SamplingParams(seed=1, max_tokens=20, logprobs=2, ignore_eos=True, **FEW_TOKENS)
    with batch_invariant(64):
        want = Engine(tiny("llama"), page_size=16).generate(prompts(3), params)
        engine = Engine(tiny("llama"), page_size=16, speculate=source)
        assert [engine.generate(prompts(3), params) for _ in range(2)] == [want, want]
    assert engine.stats.drafted_tokens > 0


def test_streams_and_aborts(always, tiny):
    model = tiny("llama")
    params = SamplingParams(seed=1, max_tokens=20, logprobs=1, stop=["ABC"])
    want = Engine(model, TOKENIZER, page_size=16).generate(prompts(), params)
    engine = Engine(model, TOKENIZER, page_size=16, speculate="history", debug=True)
    engine.generate(prompts(), params)
    sizes, text, tokens = [], [""] * 5, [[] for _ in range(5)]
    for event in engine.stream(prompts(), params):
        sizes.append(len(event.token_ids))
        assert event.logprobs is not None and len(event.logprobs) == len(event.token_ids)
        text[event.request_id] += event.text
        tokens[event.request_id] += event.token_ids
    assert tokens == [c.token_ids for c in want] and text == [c.text for c in want]
    assert max(sizes) > 1
    ids = [engine.add_request(prompt, params) for prompt in prompts()]
    done = {e.request_id: e.completion for _ in range(2) for e in engine.step() if e.completion}
    engine.abort(ids[0])
    for _ in range(100):
        done |= {e.request_id: e.completion for e in engine.step() if e.completion}
    for number, completion in zip(ids[1:], want[1:], strict=True):
        assert contents([done[number]]) == contents([completion])
    if ids[0] in done:
        assert done[ids[0]].token_ids == want[0].token_ids[: len(done[ids[0]].token_ids)]


def test_logits_that_are_not_finite_after_a_draft_end_the_request_where_they_would(always, tiny):
    """A NaN after the third new token: the tokens before it are kept, and the error is the same."""
    model, results = tiny("llama"), []
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for source in (None, "history"):
        engine = Engine(model, page_size=16, speculate=source)
        engine.generate(prompts(2), params)
        engine.generate(prompts(2), params)
        runner, real = engine._executor.runner, engine._executor.runner._forward

        def poisoned(step, real=real):
            logits, first = real(step), min(len(p) for p in prompts(2))
            rows = zip(step.sampled_requests, step.sampled_positions.tolist(), strict=True)
            bad = [i for i, (q, at) in enumerate(rows) if q.prompt_len == first and at == first + 3]
            return logits.index_fill(0, torch.tensor(bad, dtype=torch.int64), torch.nan)

        runner._forward = poisoned
        results.append(engine.generate(prompts(2), params))
    assert results[0] == results[1]
    assert [len(c.token_ids) for c in results[1]] == [3, 20] and "not numbers" in results[1][
        0
    ].error


def test_models_with_states_and_several_ranks_are_refused(tiny, monkeypatch):
    from nopad.cli.tiny_model import tiny_model
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    hybrid, _ = tiny_model(CONFIG_MAPPING["lfm2"](), every_kind=True)
    with pytest.raises(ValueError, match="rejected tokens would change the states of its layers"):
        Engine(hybrid, speculate="ngram")
    monkeypatch.setattr(settings, "replica_ranks", lambda _: range(2))
    with pytest.raises(ValueError, match="cannot be used with tensor parallelism"):
        Engine(tiny("llama"), speculate="history")
