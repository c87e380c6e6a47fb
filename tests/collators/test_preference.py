"""Preference pairs in one packed row."""

from __future__ import annotations

import pytest
from nopad.collators import PreferenceCollator

PAIR = {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5], "rejected_ids": [6, 7, 8]}


def test_answers_count_and_prompts_do_not():
    batch = PreferenceCollator()([PAIR, PAIR])
    answer = [[-100, -100, -100, 4, 5], [-100, -100, -100, 6, 7, 8]]
    assert batch["labels"].tolist() == [[*answer[0], *answer[1], *answer[0], *answer[1]]]
    assert batch["is_chosen"].tolist() == [True, False, True, False]


def test_too_long_a_pair_loses_the_prompt_s_head_first():
    batch = PreferenceCollator(max_length=4)([PAIR])
    assert batch["input_ids"].tolist() == [[2, 3, 4, 5, 3, 6, 7, 8]]


@pytest.mark.parametrize("missing", ["prompt_ids", "chosen_ids", "rejected_ids"])
def test_a_missing_part_is_named(missing):
    with pytest.raises(ValueError, match="a pair needs `prompt_ids`"):
        PreferenceCollator()([{k: v for k, v in PAIR.items() if k != missing}])
