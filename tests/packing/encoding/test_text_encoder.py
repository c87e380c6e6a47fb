"""Batches of texts have the ids of the tokenizer, or the tokenizer itself encodes them."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from nopad.packing import tokenize
from nopad.packing.encoding import Encoder, shard_job, text_encoder, tokenization
from nopad.packing.encoding.text_encoder import (
    HARD_CASES,
    TextEncoder,
    choose_encoder,
    encode_texts,
)
from nopad.packing.token_ids import validate_token_ids
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="module")
def tokenizer():
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"]
    )
    inner.train_from_iterator(HARD_CASES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>")


class Wrong:
    """A library that encodes all texts but the hard cases otherwise."""

    def __init__(self, tokenizer):
        self.stock = tokenizer.backend_tokenizer

    def encode(self, text, *_):
        return SimpleNamespace(ids=self.stock.encode(text).ids + [1] * ("odd" in text))

    def no_truncation(self):
        pass

    no_padding = no_truncation


@pytest.fixture
def wrong_library(tokenizer, monkeypatch):
    library = SimpleNamespace(Tokenizer=SimpleNamespace(from_json_str=lambda _: Wrong(tokenizer)))
    monkeypatch.setitem(sys.modules, "fastokens", library)


@pytest.mark.parametrize("library", ["tokenizers", "fastokens"])
@pytest.mark.parametrize("add_eos", [True, 5, False])
def test_texts_in_batches_have_the_ids_of_texts_one_by_one(tokenizer, library, add_eos):
    if library == "fastokens":
        pytest.importorskip("fastokens", reason="an optional library, compared with the tokenizer")
    rows = [{"text": text, "url": "x"} for text in HARD_CASES if text]
    rows += [{"text": "ends<|endoftext|>"}, "a text"]
    encoder = Encoder(tokenizer, add_eos=add_eos)
    wanted = [sample.tokens for sample in encoder.encode(rows)]
    encoder.text_encoder = TextEncoder(tokenizer, library)
    ids, lengths = encode_texts(encoder, rows, check=True)
    parts = np.split(validate_token_ids(ids), np.cumsum(lengths)[:-1])
    assert [part.tolist() for part in parts] == [tokens.tolist() for tokens in wanted]


@pytest.mark.parametrize(
    "row", [{"text": ""}, {"text": 3}, {"input_ids": [1]}, {"text": "a", "messages": []}, {"no": 1},
            {"text": "a", "loss_mask": [1]}, {"prompt": "a", "completion": "b"}, "\ud800"]
)  # fmt: skip
def test_rows_of_another_kind_are_left_to_the_encoder(tokenizer, row):
    encoder = Encoder(tokenizer)
    encoder.text_encoder = TextEncoder(tokenizer, "tokenizers")
    assert encode_texts(encoder, [{"text": "a"}]) is not None
    assert encode_texts(encoder, [{"text": "a"}, row]) is None


def test_ids_beyond_the_vocabulary_are_left_to_the_encoder(tokenizer):
    encoder = Encoder(tokenizer, vocab_size=300)
    encoder.text_encoder = TextEncoder(tokenizer, "tokenizers")
    assert encode_texts(encoder, [{"text": "  leading"}]) is None


def test_a_library_that_gives_other_ids_is_not_used_and_it_is_said(tokenizer, wrong_library):
    chosen, line = choose_encoder(tokenizer, ["fine"])
    assert chosen.library == "fastokens" and line == "encoding with fastokens"
    chosen, line = choose_encoder(tokenizer, ["fine", "odd"])
    assert chosen.library == "tokenizers"
    assert line == "fastokens gives other ids; encoding with tokenizers"
    assert choose_encoder(lambda text: [1], [])[0] is None


def test_a_library_that_differs_later_is_noticed_in_the_first_text_of_a_shard(
    tokenizer, wrong_library, tmp_path, monkeypatch
):
    monkeypatch.setattr(shard_job, "RANGE_BYTES", 100)
    monkeypatch.setattr(tokenization, "CHECKED_BYTES", 50)
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "fine fine fine"}\n' * 20 + '{"text": "odd odd"}\n' * 20)
    with pytest.raises(ValueError, match=r"fastokens encodes 'odd odd'... differently than the"):
        tokenize(path, tmp_path / "out", tokenizer=tokenizer, processes=1)


def test_the_encoder_is_said_once_for_data_of_megabytes(tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "fastokens", None)  # it is not installed
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "fine fine fine"}\n' * 20)
    tokenize(path, tmp_path / "one", tokenizer=tokenizer)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(tokenization, "CHECKED_BYTES", 50)
    tokenize(path, tmp_path / "two", tokenizer=tokenizer)
    assert capsys.readouterr().err == (
        'nopad: fastokens would be faster, but is not installed (pip install "nopad[fastokens]"); '
        "encoding with tokenizers\n"
    )
    assert text_encoder.CHECKED_BYTES > 1 << 20
