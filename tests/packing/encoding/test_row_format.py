"""Rows of Alpaca, ShareGPT and functions of one's own."""

from __future__ import annotations

import datasets
import pytest
from char_tokenizer import tokenize_chars
from nopad.packing import IGNORE_INDEX, PackedDataset
from nopad.packing.encoding import Encoder

ALPACA = {"instruction": "Add.", "input": "1 2", "output": "3"}


def texts(data: PackedDataset) -> list[tuple[str, str]]:
    """The text of every sequence, and the part of it that counts."""
    found = []
    for pack in data:
        for a, b in zip(pack.cu_seqlens[:-1], pack.cu_seqlens[1:], strict=True):
            tokens, labels = pack.tokens[a:b], pack.labels[a:b]
            counted = tokens[labels != IGNORE_INDEX]
            found.append(tuple("".join(map(chr, ids)) for ids in (tokens, counted)))
    return found


@pytest.mark.parametrize("columns", ["list", "dataset"])
def test_alpaca_rows_are_prompts_in_the_words_of_its_authors(columns):
    rows = [{**ALPACA, "text": "as published"}, {**ALPACA, "input": "", "text": "as published"}]
    source = rows if columns == "list" else datasets.Dataset.from_list(rows)
    data = PackedDataset(
        source, tokenizer=tokenize_chars, format="alpaca", budget=999, shuffle=False, add_eos=False
    )
    (with_input, counted), (without, _) = sorted(texts(data), key=lambda text: -len(text[0]))
    assert with_input.endswith("### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n3")
    assert without.startswith("Below is an instruction that describes a task. Write a response")
    assert "paired with an input" in with_input and "### Input" not in without
    assert counted == "3" and data.settings["format"] == "alpaca"


def test_sharegpt_rows_are_chats(monkeypatch):
    seen = []

    def encode_chat(tokenizer, messages, first, tools):
        seen.append((messages, tools))
        raise ValueError("enough")

    monkeypatch.setattr("nopad.packing.encoding.encoder.encode_chat", encode_chat)
    turns = [("human", "hi", None), ("gpt", "ho", 0), ("observation", "x", None)]
    turns = [{"from": f, "value": v, "weight": w} for f, v, w in turns]
    row = {"system": "be kind", "conversations": turns, "tools": [{"name": "f"}]}
    Encoder(tokenize_chars, format="sharegpt").encode([row])
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho", "weight": 0},
        {"role": "tool", "content": "x"},
    ]
    assert seen == [(messages, [{"name": "f"}])]


def question(row):
    return {"prompt": row["q"], "completion": row["a"]}


def test_a_function_converts_rows_and_its_errors_are_those_of_the_row():
    rows = [{"q": "ab", "a": "c"}, {"q": "de"}, {"q": "f", "a": "g"}]
    options = {"tokenizer": tokenize_chars, "format": question, "budget": 9}
    data = PackedDataset(rows, on_error="skip", **options)
    assert sorted(texts(data)) == [("abc", "c"), ("fg", "g")]
    assert data.skipped.reasons == ["list, row 1: KeyError: 'a'"]
    assert data.settings["format"].endswith("test_row_format.question")
    with pytest.raises(ValueError, match="list, row 1: KeyError: 'a'"):
        PackedDataset(rows, **options)


@pytest.mark.parametrize(
    ("row", "chosen", "told"),
    [
        ({"text": "a"}, "alpaca", r"keys \['text'\] is not alpaca: it has no instruction and out"),
        ("a", "sharegpt", "a row of type str is not sharegpt"),
        ({**ALPACA, "history": [["a", "b"]]}, "alpaca", "history of several turns"),
        (
            {"conversations": [{"from": "me", "value": "a"}]},
            "sharegpt",
            "speaker 'me', known are",
        ),
        ({"conversations": [{"role": "user"}]}, "sharegpt", "needs from and value"),
        (ALPACA, None, 'pass format="alpaca"'),
        ({"conversations": []}, None, 'pass format="sharegpt"'),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, None, "it is a preference pair"),
        ({"chosen": [], "rejected": []}, None, "it is a preference pair, which PreferenceCollator"),
    ],
)
def test_a_row_of_another_format_is_refused_with_the_way_out(row, chosen, told):
    (error,) = Encoder(tokenize_chars, format=chosen).encode([row])
    with pytest.raises(ValueError, match=told):
        raise error


def test_a_format_that_would_have_no_effect_or_is_unknown_is_refused():
    tokens = datasets.Dataset.from_dict({"input_ids": [[1, 2]]})
    with pytest.raises(ValueError, match="format='alpaca' applies to rows, but this data has"):
        PackedDataset(tokens, budget=8, format="alpaca")
    with pytest.raises(ValueError, match="format='vicuna': choose alpaca, sharegpt, or pass a fun"):
        PackedDataset([[1, 2]], budget=8, format="vicuna")
