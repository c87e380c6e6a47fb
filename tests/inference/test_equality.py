"""Every greedy completion equals the same request run alone by Transformers' own generate (B4)."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nopad.inference import Engine, SamplingParams

QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
_alone: dict = {}


def alone(model, prompt: list[int], new: int) -> list[int]:
    """Tokens of a request that `generate` runs alone."""
    key = (id(model), tuple(prompt), new)
    if key not in _alone:
        ids = torch.tensor([prompt])
        out = model.generate(ids, max_new_tokens=new, do_sample=False, use_cache=True)
        _alone[key] = out[0, len(prompt) :].tolist()
    return _alone[key]


def requests(seed: int, count: int, vocab_size: int = 97) -> list[tuple[list[int], int]]:
    rng = random.Random(seed)
    shared = [rng.randrange(3, vocab_size) for _ in range(40)]
    pairs = []
    for _ in range(count):
        prompt = shared[: rng.choice([0, 0, 17, 33])]
        prompt = prompt + [rng.randrange(3, vocab_size) for _ in range(rng.randint(1, 25))]
        pairs.append((prompt, rng.randint(1, 10)))
    return pairs


@settings(max_examples=3, deadline=None, suppress_health_check=QUIET, derandomize=True)
@given(data=st.data())
def test_completions_equal_generate_alone(tiny, family, data):
    model = tiny(family)
    pairs = requests(data.draw(st.integers(0, 5)), data.draw(st.integers(1, 6)))
    page = data.draw(st.sampled_from([16, 32, 64]))
    min_pages = max(-(-(len(p) + n) // page) for p, n in pairs)
    engine = Engine(
        model,
        page_size=page,
        memory=page_bytes(model, page) * (min_pages + data.draw(st.integers(0, 3))),
        max_num_seqs=data.draw(st.integers(1, 5)),
        max_num_batched_tokens=data.draw(st.sampled_from([1, 5, 16, 256])),
        debug=data.draw(st.booleans()),
    )
    priorities = [data.draw(st.integers(0, 1)) for _ in pairs]
    params = [SamplingParams(temperature=0, max_tokens=n) for _, n in pairs]
    out = engine.generate([p for p, _ in pairs], params, priority=priorities)
    for completion, (prompt, new) in zip(out, pairs, strict=True):
        assert completion.error is None
        assert completion.token_ids == alone(model, prompt, new)


def page_bytes(model, page: int) -> int:
    from nopad.attention import PagedCache, layer_shapes

    return PagedCache.bytes_per_page(layer_shapes(model), page, torch.float32)


@pytest.mark.smoke("engine ≡ generate")
def test_arrivals_and_cancellations_do_not_change_the_others(tiny):
    model = tiny("llama")
    pairs = requests(3, 8)
    for seed in range(6):
        rng = random.Random(seed)
        engine = Engine(model, page_size=16, memory=page_bytes(model, 16) * 7, max_num_seqs=4)
        done, owner, left = {}, {}, list(range(len(pairs)))
        for _ in range(400):
            if left and rng.random() < 0.4:
                i = left.pop(0)
                prompt, new = pairs[i]
                owner[engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=new))] = i
            if owner and rng.random() < 0.05:
                engine.abort(rng.choice(list(owner)))
            for event in engine.step():
                if event.completion is not None:
                    done[owner[event.request_id]] = event.completion
            if not left and len(done) == len(pairs):
                break
        assert sorted(done) == list(range(len(pairs)))
        for i, completion in done.items():
            want = alone(model, *pairs[i])
            assert completion.token_ids == want[: len(completion.token_ids)]
            if completion.finish_reason != "abort":
                assert completion.token_ids == want


def test_the_real_small_model_tells_the_story_it_tells_alone(shared):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = shared / "models" / "stories260k"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = ["Once upon a time", "The dog", "Lily and Tom went", "One day, a big"]
    engine = Engine(model, tokenizer, page_size=16, max_num_seqs=3, max_num_batched_tokens=7)
    out = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=40))
    for prompt, completion in zip(prompts, out, strict=True):
        ids = tokenizer(prompt)["input_ids"]
        assert completion.token_ids == alone(model, ids, 40)
        whole = tokenizer.decode([*ids, *completion.token_ids], skip_special_tokens=True)
        assert prompt + completion.text == whole, "the space between them, too"
    streamed = engine.stream(prompts[1:2], SamplingParams(temperature=0, max_tokens=40))
    assert "".join(event.text for event in streamed) == out[1].text


def test_scores_equal_a_plain_forward(tiny, family):
    model = tiny(family)
    rng = random.Random(1)
    contexts = [[rng.randrange(3, 97) for _ in range(n)] for n in (1, 5, 40)]
    ends = [[[rng.randrange(3, 97) for _ in range(n)] for n in (1, 4, 9)] for _ in contexts]
    engine = Engine(model, page_size=16, max_num_batched_tokens=13)
    for context, continuations, scores in zip(
        contexts, ends, engine.score(contexts, ends), strict=True
    ):
        for continuation, score in zip(continuations, scores, strict=True):
            want, best = plain(model, context, continuation)
            np.testing.assert_allclose(score.token_logprobs, want, atol=1e-5)
            assert score.is_greedy == best and abs(score.logprob - sum(want)) < 1e-4


def plain(model, context: list[int], continuation: list[int]) -> tuple[list[float], bool]:
    ids = torch.tensor([context + continuation])
    with torch.no_grad():
        logits = model(ids).logits[0].float().log_softmax(-1)
    rows = range(len(context) - 1, ids.shape[1] - 1)
    values = [float(logits[r, ids[0, r + 1]]) for r in rows]
    return values, all(int(logits[r].argmax()) == int(ids[0, r + 1]) for r in rows)


def test_a_context_is_computed_once_for_all_its_continuations(tiny):
    engine = Engine(tiny("llama"), page_size=64)
    context = list(range(3, 83))
    engine.score([context], [[[5, 6], [7, 8], [9, 9], [10, 11]]])
    # 81 tokens for the first; the others find 64 of 81, all but the last 16-token stride.
    assert engine.stats.num_computed_tokens == 81 + 3 * (81 - 64)


def test_rolling_scores_predict_every_token_once(tiny):
    model = tiny("llama")
    engine = Engine(model, max_model_len=16)
    text = [5, 9, 11, 40, 41, 17, 23, 31, 8, 60, 61, 62, 63, 64, 65, 66, 12, 13, 14, 90, 91]
    (whole,) = Engine(model).score_rolling([text])
    np.testing.assert_allclose(whole.token_logprobs, plain(model, [2], text)[0], atol=1e-5)
    (cut,) = engine.score_rolling([text])
    assert len(cut.token_logprobs) == len(text)
    np.testing.assert_allclose(cut.token_logprobs[:15], whole.token_logprobs[:15], atol=1e-5)
    assert engine.stats.num_computed_tokens < 3 * len(text)


@pytest.mark.slow
@pytest.mark.timeout(0)
@settings(max_examples=200, deadline=None, suppress_health_check=QUIET)
@given(data=st.data())
def test_completions_equal_generate_alone_many_times(tiny, family, data):
    test_completions_equal_generate_alone.hypothesis.inner_test(tiny, family, data)
