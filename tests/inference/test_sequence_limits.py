"""Requests beyond a model's limit fail alone, and the others get what they get without them."""

from types import SimpleNamespace

import pytest
import torch
from nopad.attention.hf import random_documents
from nopad.inference import Engine, SamplingParams
from odd_models import LIMIT, odd_model

ROTARY = ("longrope", "longrope_moe", "dynamic")
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def prompts(model, *lengths):
    return [ids[0].tolist() for ids in random_documents(model, lengths)]


@pytest.mark.parametrize("kind", [*ROTARY, "chunked"])
def test_a_request_beyond_the_limit_fails_alone(kind):
    model = odd_model(kind)
    short, long, other = prompts(model, 9, LIMIT + 14, 12)
    alone = [Engine(model).generate([prompt], GREEDY)[0] for prompt in (short, other)]
    first, failed, last = Engine(model).generate([short, long, other], GREEDY)
    assert [first.token_ids, last.token_ids] == [c.token_ids for c in alone]
    reason = "attends in chunks of 16" if kind == "chunked" else "rotary embedding"
    assert "30 tokens" in failed.error and reason in failed.error
    scores = Engine(model).score([short[:2], long[:2]], [short[2:], long[2:]])
    assert scores[0].error is None and reason in scores[1].error


@pytest.mark.parametrize("kind", [*ROTARY, "chunked"])
def test_completions_up_to_the_limit_equal_generate(kind):
    model = odd_model(kind)
    (prompt,) = prompts(model, 11)
    engine = Engine(model, max_num_batched_tokens=4)  # chunks of the prompt, then decodes
    got = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    ids = torch.tensor([prompt])
    with torch.no_grad():
        while ids.shape[1] < LIMIT:
            token = odd_model(kind)(input_ids=ids, use_cache=False).logits[0, -1].argmax()
            ids = torch.cat([ids, token[None, None]], 1)
    assert got[0].token_ids == ids[0, 11:].tolist() and got[0].finish_reason == "length"


@pytest.mark.parametrize("kind", [*ROTARY, "chunked"])
def test_a_longer_max_model_len_is_refused_with_the_reason(kind):
    Engine(odd_model(kind), max_model_len=LIMIT + 1)  # the last token is never run
    with pytest.raises(ValueError, match=r"max_model_len is 18; .*16 tokens: use at most 16"):
        Engine(odd_model(kind), max_model_len=LIMIT + 2)


@pytest.mark.parametrize("kind", ROTARY)
def test_generation_leaves_no_trace_in_the_frequencies(kind):
    model = odd_model(kind)
    rotary = model.model.rotary_emb
    (long,) = random_documents(model, (LIMIT + 14,))
    with torch.no_grad():
        before = model(input_ids=long, use_cache=False).logits
    buffers, attributes = rotary._buffers.copy(), dict(vars(rotary))
    Engine(model).generate(prompts(model, 9, 12), GREEDY)
    assert all(rotary._buffers[name] is tensor for name, tensor in buffers.items())
    assert vars(rotary) == attributes
    with torch.no_grad():
        assert torch.equal(model(input_ids=long[:, :-1], use_cache=False).logits, before[:, :-1])


@pytest.mark.parametrize("kind", ROTARY)
def test_prefixes_survive_forwards_that_choose_frequencies_anew(kind):
    model = odd_model(kind, limit=96)
    prompt, long = prompts(model, 80, 120)
    engine = Engine(model)
    computed = []
    for _ in range(3):
        engine.generate([prompt], GREEDY)
        computed.append(engine.stats.num_computed_tokens)
        with torch.no_grad():
            model(input_ids=torch.tensor([long]), use_cache=False)
    first, second, third = computed
    assert second - first < 20 and third - second < 20


@pytest.mark.parametrize("kind", ["longrope", "chunked"])
def test_the_harness_asks_for_the_length_it_is_to_work_with(kind):
    harness = pytest.importorskip("nopad.inference.harness", reason="this is about lm_eval")
    tokenizer = SimpleNamespace(bos_token_id=1, eos_token_id=2, model_max_length=1 << 40)
    with pytest.raises(ValueError, match=r"use at most 16 \(the harness calls it max_length\)"):
        harness.EngineLM(odd_model(kind), tokenizer)
