"""Preference pairs in one packed row."""

from __future__ import annotations

import re

import pytest
from char_words import char_tokenizer
from nopad.collators import PreferenceCollator

PAIR = {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5], "rejected_ids": [6, 7, 8]}


def test_answers_count_and_prompts_do_not():
    batch = PreferenceCollator()([PAIR, PAIR])
    answer = [[-100, -100, -100, 4, 5], [-100, -100, -100, 6, 7, 8]]
    assert batch["labels"].tolist() == [[*answer[0], *answer[1], *answer[0], *answer[1]]]
    assert batch["is_chosen"].tolist() == [True, False, True, False]


def test_a_trainer_of_padded_pairs_is_told_what_it_got():
    from accelerate.utils import send_to_device

    batch = send_to_device(PreferenceCollator()([PAIR]), "cpu")
    assert "completion_mask" not in batch and batch.get("completion_mask") is None
    with pytest.raises(ValueError, match=r"packs pairs and has no 'completion_mask'.*DPOTrainer"):
        batch["completion_mask"]


def test_too_long_a_pair_loses_its_prompt_s_head_once_for_both():
    batch = PreferenceCollator(max_length=4)([PAIR])
    assert batch["input_ids"].tolist() == [[3, 4, 5, 3, 6, 7, 8]]
    batch = PreferenceCollator(max_length=3)([PAIR])
    assert batch["input_ids"].tolist() == [[3, 4, 5, 3, 6, 7]]
    assert batch["labels"].tolist() == [[-100, 4, 5, -100, 6, 7]]


@pytest.mark.parametrize(("max_length", "cut"), [(None, 0), (6, 0), (5, 2)])
def test_pairs_that_lose_tokens_are_counted(max_length, cut):
    collator = PreferenceCollator(max_length=max_length)
    for _ in range(2):
        collator([PAIR])
    assert collator.num_cut == cut


@pytest.mark.parametrize(
    ("part", "ids", "told"),
    [
        ("prompt_ids", [1.9, 2], "prompt_ids must be integers, got float64"),
        ("chosen_ids", [3.7], "chosen_ids must be integers, got float64"),
        ("prompt_ids", [-1, 2], "contains -1"),
        ("rejected_ids", [-6], "contains -6"),
        ("rejected_ids", [], "rejected_ids is empty"),
    ],
)
def test_ids_that_are_none_are_refused(part, ids, told):
    with pytest.raises(ValueError, match=told):
        PreferenceCollator()([{**PAIR, part: ids}])


@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 0},
        {"max_length": 1},
        {"fixed_sequences": 8},
        {"pad_to_budget": True},
        {"stack": True},
    ],
)
def test_lengths_and_shapes_that_a_pair_cannot_have_are_refused(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"{name}="):
        PreferenceCollator(**options)


@pytest.mark.parametrize("missing", ["prompt_ids", "chosen_ids", "rejected_ids"])
def test_a_missing_part_is_named(missing):
    left = {k: v for k, v in PAIR.items() if k != missing}
    told = f"chosen_ids and rejected_ids, or prompt, chosen and rejected, got {list(left)}"
    with pytest.raises(ValueError, match=re.escape(told)):
        PreferenceCollator()([left])


@pytest.mark.parametrize("pair", [None, 3, [[1], [2], [3]]])
def test_a_pair_that_is_none_is_refused_by_its_type(pair):
    with pytest.raises(ValueError, match=f"rejected, got {type(pair).__name__}"):
        PreferenceCollator()([pair])


def test_an_end_without_a_tokenizer_is_refused():
    with pytest.raises(ValueError, match="add_eos= is for pairs of text"):
        PreferenceCollator(add_eos=False)


def test_a_length_that_is_no_whole_number_is_refused():
    with pytest.raises(ValueError, match=r"max_length 2\.5 must be an integer"):
        PreferenceCollator(max_length=2.5)


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_pairs_of_text_are_read_like_prompts_and_completions():
    pair = {"prompt": "ab", "chosen": "c", "rejected": "de", "score": 1.0}
    batch = PreferenceCollator(tokenizer=letters, add_eos=0)([pair])
    assert batch["input_ids"].tolist() == [[97, 98, 99, 0, 97, 98, 100, 101, 0]]
    assert batch["labels"].tolist() == [[-100, -100, 99, 0, -100, -100, 100, 101, 0]]
    short = PreferenceCollator(tokenizer=letters, add_eos=0, max_length=3)([pair])
    assert short["input_ids"].tolist() == [[98, 99, 0, 98, 100, 101]]


def test_what_two_conversations_share_is_their_prompt():
    tokenizer = char_tokenizer("abcdehinosuy<>")
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "no"}]
    other = {"role": "assistant", "content": "yes"}
    collator = PreferenceCollator(tokenizer=tokenizer)
    given = collator([{"prompt": turns[:1], "chosen": turns[1:], "rejected": [other]}])
    found = collator([{"chosen": turns, "rejected": [turns[0], other]}])
    assert found["input_ids"].tolist() == given["input_ids"].tolist()
    assert found["labels"].tolist() == given["labels"].tolist()
    assert (found["labels"] != -100).sum() > 0


def test_conversations_with_a_prompt_of_text_and_tools_are_read():
    tokenizer = char_tokenizer("abcdehinosuy<>")
    tokenizer.chat_template = (
        "{{ tools | length if tools else '' }}{% for m in messages %}<{{ m.role }}>"
        "{{ 'calls' if m.tool_calls is defined }}{{ m.content }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    turn = {"role": "user", "content": "hi", "tool_calls": None}
    chosen, rejected = ([turn, {"role": "assistant", "content": c}] for c in ("no", "yes"))
    collator = PreferenceCollator(tokenizer=tokenizer)
    plain = {"role": "user", "content": "hi"}
    expected = collator([{"prompt": [plain], "chosen": chosen[1:], "rejected": rejected[1:]}])
    found = collator([{"prompt": "hi", "chosen": chosen, "rejected": rejected}])
    assert found["input_ids"].tolist() == expected["input_ids"].tolist()
    tools = [{"type": "function", "function": {"name": "f"}}]
    with_tools = collator([{"chosen": chosen, "rejected": rejected, "tools": tools}])
    assert with_tools["input_ids"].shape[1] == found["input_ids"].shape[1] + 2


@pytest.mark.parametrize(
    ("pair", "tokenizer", "told"),
    [
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            None,
            r"PreferenceCollator\(tokenizer=\)",
        ),
        ({"chosen": "b", "rejected": "c"}, letters, "without a prompt needs messages"),
        ({"prompt": "a", "chosen": "", "rejected": "c"}, letters, "completion is empty"),
    ],
)
def test_text_that_is_no_pair_is_refused(pair, tokenizer, told):
    with pytest.raises(ValueError, match=told):
        PreferenceCollator(tokenizer=tokenizer)([pair])
