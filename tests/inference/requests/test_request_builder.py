"""An invalid prompt or parameter fails alone, or raises one line."""

from __future__ import annotations

import numpy as np
import pytest
from fake_tokenizer import FakeTokenizer
from nopad.inference import DataParallelEngine, Engine, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
CHAT = [{"role": "user", "content": "x"}]


class RaisingTokenizer(FakeTokenizer):
    """Raises what tokenizers raise: at surrogates, and in the chat template."""

    chat_template = "some"

    def __call__(self, text, add_special_tokens=True):
        if "\ud800" in text:
            raise TypeError("TextEncodeInput must be Union[TextInputSequence]")
        return super().__call__(text, add_special_tokens)

    def apply_chat_template(self, messages, **_):
        raise LookupError("roles must alternate")


@pytest.fixture
def engine(tiny):
    return Engine(tiny("llama"), RaisingTokenizer(bos_token_id=1, eos_token_id=0), page_size=16)


@pytest.mark.parametrize("bad", ["a\ud800", CHAT])
def test_whatever_a_tokenizer_raises_is_the_prompts_own(engine, bad):
    want = engine.generate(["abc"], GREEDY)
    beside = engine.add_request([5, 6, 7], GREEDY)
    refused, *rest = engine.generate([bad, "abc"], GREEDY)
    assert refused.finish_reason == "error" and "cannot read the prompt: " in refused.error
    assert ("surrogate" in refused.error) == isinstance(bad, str) and "\ud800" not in refused.error
    assert rest == want
    ended = [e for _ in range(9) for e in engine.step() if e.completion]
    assert [e.request_id for e in ended] == [beside] and ended[0].completion.error is None
    spoilt, fine = engine.score([bad, "abc"], ["d", "d"])
    assert "cannot read the prompt: " in spoilt.error and fine == engine.score(["abc"], ["d"])[0]
    spoilt, fine = engine.score_rolling([bad, "abc"])
    assert "cannot read the prompt: " in spoilt.error and fine.error is None


PROMPTS = [None, 7, 0.5, [None], [[3], 4], [{"role": None}], {}]
PARAMS = [{"max_tokens": "x"}, {"max_tokens": None}, "ab", 3]


@pytest.mark.parametrize(
    ("prompt", "params"), [*((p, None) for p in PROMPTS), *(("abc", q) for q in PARAMS)]
)
def test_all_ranks_refuse_what_one_engine_refuses(engine, prompt, params):
    ranks = DataParallelEngine(engine)

    def outcome(call, *args):
        try:
            return repr(call(*args))
        except ValueError as error:
            return str(error)

    prompts, each = [prompt, "abc"], [params, GREEDY]
    assert outcome(ranks.generate, prompts, each) == outcome(engine.generate, prompts, each)
    contexts, after = ["abc", prompt, "abc"], ["d", "d", prompt]
    assert outcome(ranks.score, contexts, after) == outcome(engine.score, contexts, after)


def test_arguments_that_fit_no_prompt_are_named(engine):
    for generate in (engine.generate, DataParallelEngine(engine).generate):
        with pytest.raises(ValueError, match=r"params is 3; pass SamplingParams"):
            generate(["abc"], 3)
        with pytest.raises(ValueError, match=r"prompts is one int; pass a list"):
            generate(7)
        with pytest.raises(ValueError, match=r"2 params for 1 prompts"):
            generate(["abc"], [GREEDY, GREEDY])
    with pytest.raises(ValueError, match=r"priority is 2\.5; pass a whole number"):
        engine.generate(["abc"], GREEDY, priority=2.5)
    with pytest.raises(ValueError, match=r"priority is 'x'; pass a whole number"):
        engine.generate(["abc", "abc"], GREEDY, priority=["x", 1])


def test_a_list_of_no_continuations_gives_a_list_of_no_scores(engine):
    none, one, two = engine.score(["abc", "abc", "abc"], [[], "d", ["d", [5, 6]]])
    assert none == [] and one == two[0] and len(two) == 2
    assert DataParallelEngine(engine).score(["abc"], [[]]) == [[]]


@pytest.mark.parametrize(
    "ids", [[5, np.int32(6), True], [np.int64(5), 6], (5, 6), np.array([5, 6], np.uint8)]
)
def test_ids_are_whole_numbers_of_any_kind(engine, ids):
    want = [int(i) for i in ids]
    (completion,) = engine.generate([ids], GREEDY)
    assert completion.error is None and completion.prompt_token_ids == want


@pytest.mark.parametrize(
    "ids", [[5, 6.0], [5, "6"], [5, None], [5, [6]], [True, False], [1, 2**63]]
)
def test_a_list_that_only_starts_with_an_id_raises(engine, ids):
    with pytest.raises(ValueError, match="prompt 1: a prompt is a list; pass text"):
        engine.generate([[5], ids], GREEDY)


@pytest.mark.parametrize("name", ["temperature", "priority", "deadline"])
def test_a_single_wrong_value_raises_also_without_prompts(engine, name):
    options = {"params": {"temperature": -1}} if name == "temperature" else {name: "x"}
    with pytest.raises(ValueError, match=f"{name} is "):
        engine.generate([], **options)
