"""Scores of unusual texts, and one-line errors for what cannot be scored."""

from __future__ import annotations

import pytest
from fake_tokenizer import FakeTokenizer
from nopad.inference import DataParallelEngine, Engine


@pytest.fixture
def engine(tiny):
    return Engine(tiny("llama"), FakeTokenizer(bos_token_id=1, eos_token_id=500), page_size=16)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("length", [1, 0, -3, 2.5, "a", True])
def test_windows_that_predict_nothing_are_refused(engine, length):
    with pytest.raises(ValueError, match=rf"max_length is {length!r}; it must be a whole number"):
        engine.score_rolling(["once upon"], max_length=length)


def test_the_shortest_windows_predict_each_token_from_the_one_before(engine):
    (cut,) = engine.score_rolling(["once"], max_length=2)
    ids = [1, *(ord(letter) - 32 for letter in "once")]
    alone = engine.score([[i] for i in ids[:-1]], [[i] for i in ids[1:]])
    assert cut.token_logprobs == pytest.approx([one.logprob for one in alone])


def test_a_text_of_nothing_is_certain(engine):
    nothing, something, ids = engine.score_rolling(["", "once", []])
    assert nothing == ids and something.error is None
    assert (nothing.logprob, nothing.is_greedy, nothing.token_logprobs) == (0.0, True, [])
    assert nothing.error is None and isinstance(nothing.logprob, float)


def test_an_empty_continuation_is_told_as_what_it_is(engine):
    for context, after in (("ab", ""), ("", ""), ([5, 6], [[]]), ("ab", [[]])):
        (found,) = engine.score([context], [after])
        (found,) = found if isinstance(found, list) else (found,)
        assert found.error == "the continuation is empty; pass at least one token"


def test_one_text_is_not_taken_for_a_list_of_letters(engine):
    for score in (engine.score, DataParallelEngine(engine).score):
        with pytest.raises(ValueError, match="contexts is one str; pass a list of contexts"):
            score("once", "upon")
        with pytest.raises(ValueError, match="continuations is one str; pass a list"):
            score(["o"], "u")
        with pytest.raises(ValueError, match="2 contexts, 1 continuations"):
            score(["a", "b"], ["c"])
    with pytest.raises(ValueError, match="texts is one str; pass a list of texts"):
        engine.score_rolling("once")


def test_a_beginning_beyond_the_vocabulary_is_not_begun_with(tiny):
    tokenizer = FakeTokenizer(bos_token_id=700, eos_token_id=500)
    (found,) = Engine(tiny("llama"), tokenizer, page_size=16).score_rolling(["ab"])
    assert found.error is None and len(found.token_logprobs) == 2, "the model's own end begins it"
