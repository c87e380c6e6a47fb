"""Detokenization in bounded time; texts end exactly at the stop string that ended them."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
from fake_tokenizer import FakeTokenizer
from nopad.inference import Engine, SamplingParams
from nopad.inference.requests.detokenizer import Detokenizer
from nopad.inference.requests.output_processor import RequestGroup
from nopad.inference.requests.request import Request


@pytest.fixture
def engine(tiny):
    return Engine(tiny("llama"), FakeTokenizer(), page_size=16)


def said(engine, **more) -> tuple:
    """The completion of a prompt, and its text as it was streamed."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, **more)
    (done,) = engine.generate(["hello"], params)
    events = list(engine.stream(["hello"], params))
    assert events[-1].completion == done
    return done, "".join(event.text for event in events)


def test_a_stop_string_before_min_tokens_is_ordinary_text(engine):
    whole = said(engine)[0].text
    done, streamed = said(engine, min_tokens=20, stop=[whole[1], whole[3:5]])
    assert done.text == streamed == whole and done.finish_reason == "length"


def test_a_text_is_cut_at_the_stop_string_that_ended_it(engine):
    whole = said(engine)[0].text
    late = next(i for i in range(9, 20) if whole[i] not in whole[6:i])
    done, streamed = said(engine, min_tokens=6, stop=[whole[late], whole[1:3]])
    assert done.finish_reason == "stop" and len(done.token_ids) == late + 1
    assert done.text == streamed == whole[:late]


def test_a_stop_token_gives_the_same_text_with_and_without_stop_strings(engine):
    first, _ = said(engine)
    ends = first.token_ids[5]
    place = first.token_ids.index(ends)
    for stop in ((), "never there"):
        done, streamed = said(engine, stop_token_ids=[ends], stop=stop)
        assert done.text == streamed == first.text[: place + 1]
    done, streamed = said(engine, stop_token_ids=[ends], stop=first.text[place])
    assert done.text == streamed == first.text[:place]


def test_a_stop_string_that_is_a_special_token_stops_by_its_id(tiny):
    tokenizer = FakeTokenizer(special_tokens={90: "<|end|>", 0: "<unk>"})
    engine = Engine(tiny("llama"), tokenizer, page_size=16)
    whole, _ = said(engine)
    always = {"logit_bias": {90: 1000.0}}
    for stop in (["<|end|>"], ["never there", "<|end|>"]):
        done, streamed = said(engine, stop=stop, **always)
        assert (done.token_ids, done.finish_reason, done.text, streamed) == ([90], "stop", "", "")
    assert said(engine, stop=["<|other|>"], **always)[0].finish_reason == "length"
    assert said(engine, stop=["<|other|>"])[0].token_ids == whole.token_ids, (
        "an unknown name does not stop"
    )


def test_text_is_the_same_however_its_bytes_come():
    rng = random.Random(0)
    for _ in range(1500):
        pieces = [rng.choice("aé✓😀 ").encode(), rng.randbytes(9), b"xyz", b"\xff" * 20]
        data = b"".join(rng.choices(pieces, k=rng.randint(1, 12)))
        text, at = Detokenizer(lambda tokens: bytes(tokens).decode(errors="replace")), 0
        while at < len(data):
            step = rng.choice((1, 1, 1, 2, 3))
            text.push(data[at : at + step])
            at += step
        text.flush()
        assert text.text == data.decode(errors="replace")


@pytest.mark.parametrize("byte", [0xFF, 0xE2, 0x00])
def test_bytes_that_are_no_text_are_not_decoded_again_and_again(byte):
    longest = 0

    def decode(tokens):
        nonlocal longest
        longest = max(longest, len(tokens))
        return bytes(t for t in tokens if t).decode(errors="replace")

    text = Detokenizer(decode, [65])
    told = sum(bool(text.push([byte])) for _ in range(500))
    text.flush()
    assert longest < 40 and text.text == bytes([byte] * 500).strip(b"\0").decode(errors="replace")
    assert told > 30 or not byte


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_stop_string_ends_a_request_at_its_token_also_at_the_last_one(engine, lookahead):
    whole = said(engine)[0]
    engine._loop._lookahead = lookahead  # 1 as on a GPU: the next step runs meanwhile
    first = {char: whole.text.index(char) for char in whole.text}  # one token a character
    for char, index in first.items():
        engine.stats.reset()
        params = {"temperature": 0, "max_tokens": index + 1, "ignore_eos": True, "stop": char}
        for max_tokens in (index + 1, 20):
            (done,) = engine.generate(["hello"], params | {"max_tokens": max_tokens})
            assert (
                done.token_ids == whole.token_ids[: index + 1] and done.text == whole.text[:index]
            )
            assert done.finish_reason == "stop"
        assert engine.stats.finished == {"stop": 2}


def test_a_prompt_that_ends_inside_a_character_costs_no_text():
    """SentencePiece decodes each byte of an incomplete character to a character of its own."""

    def decode(tokens) -> str:
        try:
            return bytes(tokens).decode()
        except UnicodeDecodeError:
            return "".join(chr(t) if t < 128 else "\ufffd" for t in tokens)

    data = "\N{GRINNING FACE} hello".encode()
    for cut in (1, 2, 3):
        detokenizer = Detokenizer(decode, data[:cut])
        text = "".join(detokenizer.push([byte]) for byte in data[cut:]) + detokenizer.flush()
        assert text == detokenizer.text == "\N{GRINNING FACE} hello"
        group = RequestGroup(0, SimpleNamespace(decode=decode, has_tokenizer=True), False)
        request = Request(0, np.array([*data[:cut]]), 20, SamplingParams())
        request.output_token_ids, request.finish_reason = [*data[cut:]], "length"
        group.requests = [request]
        assert group.result().text == text
