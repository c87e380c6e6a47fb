"""Plain data sets in the HF Trainer and in TRL's: packed as a user would pack them."""

from __future__ import annotations

import datasets
import pytest
import tiny_run
from char_words import char_tokenizer
from hf_child import trainer
from nopad.packing import PackedDataset
from trained_packs import tokens_of, trained
from trl_run import trl_trainer

TEXTS = [{"text": "abcde"[: n % 4 + 1] * (n % 7 + 1)} for n in range(30)]
BUDGET = {"budget": tiny_run.BUDGET}


@pytest.mark.parametrize("kind", ["dataset", "list"])
def test_tokens_are_packed_with_the_budget_and_the_seed_of_the_arguments(tmp_path, kind):
    rows = tiny_run.samples(19)
    data = datasets.Dataset.from_list(rows) if kind == "dataset" else rows
    run, _ = trainer(tmp_path, data, 2, BUDGET, num_train_epochs=1, seed=3)
    wanted = tiny_run.dataset(19)
    assert run.train_dataset.settings["seed"] == 3
    assert trained(run)[: wanted.count()] == tokens_of(wanted, 99)
    assert run.state.global_step == run.args.max_steps == -(-wanted.count() // 2)
    again, _ = trainer(tmp_path, data, 1, BUDGET, max_steps=1, data_seed=5, seed=3)
    assert again.train_dataset.settings["seed"] == 5


def test_text_is_read_with_the_processing_class_and_a_stream_is_streamed(tmp_path):
    tokenizer = char_tokenizer()
    more = {**BUDGET, "processing_class": tokenizer, "eval_dataset": TEXTS[:3]}
    run, _ = trainer(tmp_path, datasets.Dataset.from_list(TEXTS), 1, more, max_steps=2, seed=1)
    wanted = PackedDataset(TEXTS, tokenizer=tokenizer, seed=1, **BUDGET)
    assert trained(run) == tokens_of(wanted, 2)
    assert run.evaluate()["eval_loss"] > 0
    stream = datasets.Dataset.from_list(TEXTS).to_iterable_dataset()
    run, _ = trainer(tmp_path, stream, 1, more, max_steps=1)
    assert run.train_dataset.lengths is None
    assert len(trained(run)) == 1
    with pytest.raises(ValueError, match=r"needs a tokenizer: pass processing_class="):
        trainer(tmp_path, datasets.Dataset.from_list(TEXTS), 1, BUDGET, max_steps=1)


def test_samples_are_cut_at_the_positions_of_the_model(tmp_path, capsys):
    rows = [{"input_ids": [5] * 100}, {"input_ids": [6] * 7}]
    run, _ = trainer(tmp_path, rows, 1, {"budget": 256}, max_steps=1)
    assert run.train_dataset.settings["max_length"] == 64
    run.train()
    assert "samples of at most 64 tokens: 1 samples split" in capsys.readouterr().out
    run, _ = trainer(tmp_path, rows, 1, {"budget": 64}, max_steps=1)
    assert run.train_dataset.settings["max_length"] is None


def test_a_budget_is_asked_for_and_refused_where_it_would_have_no_effect(tmp_path):
    data = datasets.Dataset.from_list(tiny_run.samples(9))
    with pytest.raises(ValueError, match="train_dataset is a Dataset: pass budget=, the tokens of"):
        trainer(tmp_path, data, 1, max_steps=1)
    with pytest.raises(ValueError, match="budget=32 does not apply to a PackedDataset"):
        trainer(tmp_path, tiny_run.dataset(), 1, BUDGET, max_steps=1)
    with pytest.raises(ValueError, match="train_dataset is missing"):
        trainer(tmp_path, None, 1, max_steps=1)
    with pytest.raises(ValueError, match=r"^per_device_train_batch_size=4 does not apply to packs"):
        trainer(tmp_path, data, 1, BUDGET, max_steps=1, per_device_train_batch_size=4)


def test_trl_s_trainer_packs_plain_data_with_its_own_arguments(tmp_path):
    tokenizer = char_tokenizer()
    rows = [{"body": row["text"] * 3} for row in TEXTS]
    settings = {"dataset_text_field": "body", "max_length": 10, "seed": 4, "eos_token": "b"}
    more = {**BUDGET, "processing_class": tokenizer}
    run = trl_trainer(
        tmp_path, tiny_run.model(), datasets.Dataset.from_list(rows), more, **settings
    )
    tokenizer.eos_token = "b"
    cut = {"text_column": "body", "max_length": 10, "overflow": "truncate", "seed": 4}
    wanted = PackedDataset(rows, tokenizer=tokenizer, **cut, **BUDGET)
    assert wanted.report()["truncated"] > 3
    assert trained(run) == tokens_of(wanted, 2)
    with pytest.raises(ValueError, match="max_length=64 is longer than a pack of budget=32"):
        trl_trainer(tmp_path, tiny_run.model(), rows, more, max_length=64)


def test_trl_s_formatting_function_formats_the_rows_of_both_sets(tmp_path):
    tokenizer = char_tokenizer()
    rows = datasets.Dataset.from_list([{"q": "ab", "a": "cd"}] * 9)
    more = {**BUDGET, "processing_class": tokenizer, "eval_dataset": rows}
    more["formatting_func"] = lambda row: row["q"] + row["a"]
    run = trl_trainer(tmp_path, tiny_run.model(), rows, more, gradient_accumulation_steps=1)
    (tokens,) = trained(run)
    assert tokens[:5] == [*tokenizer("abcd")["input_ids"], tokenizer.eos_token_id]
    assert run.evaluate()["eval_loss"] > 0
