"""sft reads what the API reads, with the limits it names, and says first what is wrong."""

from __future__ import annotations

import json

import pytest
import small_inputs
from nopad.recipes.sft import load_data, parse_args
from nopad.recipes.support.run_recipe import user_message
from nopad.recipes.train_hf import training_arguments

ALPACA = [{"instruction": f"w{i}", "input": "", "output": f"w{i % 7}"} for i in range(60)]


def sft_args(folder, rows, *more):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = str(small_inputs.tokenizer(folder))
    argv = [str(folder), "--data", str(path), "--tokenizer", tokenizer, "--budget", "64"]
    return parse_args([*argv, *map(str, more)])


def test_rows_of_another_layout_are_read_and_held_out(tmp_path):
    args = sft_args(tmp_path, ALPACA, "--format", "alpaca")
    tokenizer, data, examples = load_data(args)
    assert examples and all("### Instruction:\nw" in example.prompt for example in examples)
    assert len(data.lengths) == len(ALPACA) - len(examples)
    pack = next(iter(data))
    assert tokenizer.decode(pack.tokens[pack.labels >= 0]).startswith("w")


@pytest.mark.parametrize(
    ("rows", "more", "advice"),
    [
        ([{"question": "w1", "answer": "w2"}] * 3, [],
         "name the text's column with --text-column, or convert the rows to text or messages"),
        (ALPACA, [], "pass --format alpaca"),
        ([{"messages": [{"role": "user", "content": "w1 " * 80},
                        {"role": "assistant", "content": "w2"}]}] * 3, ["--max-length", "32"],
         "at most 32 are allowed: choose --overflow (split, truncate or drop), or raise "),
        (ALPACA, ["--format", "alpaca", "--max-length", "65"],
         "--max-length 65 is longer than a pack of --budget 64"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_first_in_words_of_the_command_line(
    rows, more, advice, tmp_path, capsys
):
    with pytest.raises(ValueError) as error:
        load_data(sft_args(tmp_path, rows, *more))
    assert advice in user_message(error.value) and "=" not in user_message(error.value)
    assert capsys.readouterr().out == ""


def test_longer_conversations_are_cut_at_the_length_that_is_asked_for(tmp_path):
    rows = [{"prompt": "w1 " * 40, "completion": "w2 " * 20}] * 9
    more = ["--max-length", "50", "--overflow", "truncate"]
    *_, data, _ = load_data(sft_args(tmp_path, rows, *more))
    assert max(next(iter(data)).lengths) == 50


def test_the_number_of_checkpoints_to_keep_is_an_option(tmp_path):
    args = sft_args(tmp_path, ALPACA, "--keep", "5", "--output", tmp_path / "run")
    assert training_arguments(args).save_total_limit == 5
