"""Evaluation sets of any kind, and a second training with one trainer."""

from __future__ import annotations

from itertools import pairwise

import datasets
import pytest
import tiny_run
import torch
from hf_child import trainer
from nopad.packing import PackedDataset
from trained_packs import tokens_of, trained
from trl_run import trl_trainer


def wanted_loss(run, rows) -> float:
    """The token mean over rows, one at a time, by the stock loss."""
    losses, count = 0.0, 0
    for row in rows:
        ids = torch.tensor([row["input_ids"]])
        labels = torch.tensor([row.get("labels", row["input_ids"])])
        counted = int((labels[0, 1:] != -100).sum())
        if counted:
            logits = run.model(input_ids=ids, use_cache=False).logits[0, :-1]
            losses += float(torch.nn.functional.cross_entropy(logits, labels[0, 1:])) * counted
        count += counted
    return losses / count


@pytest.mark.parametrize("columns", [("input_ids",), ("input_ids", "labels")])
def test_a_tokenized_data_set_gives_the_token_mean(tmp_path, columns):
    rows = [{name: row[name] for name in columns} for row in tiny_run.samples(9)]
    held = datasets.Dataset.from_list(rows)
    often = {"eval_strategy": "steps", "eval_steps": 1, "learning_rate": 0.0, "max_steps": 2}
    run, _ = trainer(tmp_path, tiny_run.dataset(), 1, {"eval_dataset": held}, **often)
    run.train()
    told = [line["eval_loss"] for line in run.state.log_history if "eval_loss" in line]
    assert told == pytest.approx([wanted_loss(run, rows)] * 2, rel=1e-5)
    assert run.evaluate({"a": held})["eval_a_loss"] == pytest.approx(told[0], rel=1e-6)
    assert run.evaluate(rows)["eval_loss"] == pytest.approx(told[0], rel=1e-6)
    assert run.predict(held).metrics["test_loss"] == pytest.approx(told[0], rel=1e-6)


def test_an_evaluation_set_that_does_not_fit_the_model_is_refused(tmp_path):
    run, _ = trainer(tmp_path, tiny_run.dataset(), 1, max_steps=1)
    with pytest.raises(ValueError, match="token 61 is outside the model's vocabulary"):
        run.evaluate(datasets.Dataset.from_dict({"input_ids": [[1, 2, 61]]}))
    with pytest.raises(ValueError, match="tokenizer"):
        run.evaluate(datasets.Dataset.from_dict({"text": ["a b"]}))
    with pytest.raises(ValueError, match="eval_dataset"):
        run.evaluate()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_second_training_continues_with_the_next_packs(tmp_path, workers):
    settings = {"max_steps": 3, "dataloader_num_workers": workers}
    run, _ = trainer(tmp_path, tiny_run.dataset(epochs=None), 2, **settings)
    seen = trained(run) + trained(run)
    assert seen == tokens_of(tiny_run.dataset(epochs=None), 12)


def test_a_second_training_by_epochs_takes_the_next_epochs(tmp_path):
    data = tiny_run.dataset(19)
    run, _ = trainer(tmp_path, data, 1, num_train_epochs=1)
    first, second = trained(run), trained(run)
    whole = PackedDataset(tiny_run.samples(19), budget=tiny_run.BUDGET, seed=3, epochs=2)
    assert first + second == [pack.tokens.tolist() for pack in whole]
    assert len(second) == run.state.global_step == data.count(1)


def test_a_model_made_by_model_init_gets_the_loss_at_every_training(tmp_path):
    smooth = {"label_smoothing_factor": 0.3, "learning_rate": 0.0, "max_steps": 1}
    plain, seen = trainer(tmp_path, tiny_run.dataset(epochs=None), 2, **smooth)
    plain.train()
    run, watch = trainer(tmp_path, tiny_run.dataset(epochs=None), 2, **smooth)
    run.model, run.model_init = None, lambda trial=None: tiny_run.model()
    run.train()
    assert watch.losses == seen.losses
    assert run.model.nopad_loss is run.attached_loss


def test_trials_of_a_search_train_on_the_same_data(tmp_path, monkeypatch):
    from transformers import Trainer

    run, _ = trainer(tmp_path, tiny_run.dataset(epochs=None), 2, max_steps=2)
    run.train()
    monkeypatch.setattr(Trainer, "train", lambda *_, **__: None)  # a real trial needs a library
    for trial, index in ((None, 4), ({"learning_rate": 1.0}, 0)):
        run.train(trial=trial)
        assert run.train_dataset.state_dict()["position"]["index"] == index


def token_means(model, rows) -> list[float]:
    """Accuracy and entropy over all tokens that count, one row at a time."""
    right, entropy, count = 0, 0.0, 0
    for row in rows:
        labels = torch.tensor(row["labels"])[1:]
        counted = labels != -100
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).logits[0]
        logits, labels = logits[:-1][counted], labels[counted]
        right += int((logits.argmax(-1) == labels).sum())
        entropy += float(torch.distributions.Categorical(logits=logits).entropy().sum())
        count += len(labels)
    return [right / count, entropy / count]


def test_trl_s_metrics_of_an_evaluation_are_means_over_tokens(tmp_path):
    names, rows = ("eval_mean_token_accuracy", "eval_entropy"), tiny_run.samples(23)
    run = trl_trainer(tmp_path, tiny_run.model(), tiny_run.dataset())
    run.predict(tiny_run.dataset(9))  # is not logged
    told = run.evaluate(tiny_run.dataset(23))
    assert [told[name] for name in names] == pytest.approx(token_means(run.model, rows), rel=1e-5)


def test_trl_s_metrics_of_a_step_are_means_over_its_tokens(tmp_path):
    by_epoch = {"num_train_epochs": 2, "max_steps": -1, "logging_strategy": "epoch"}
    settings = {**by_epoch, "learning_rate": 0.0}
    run = trl_trainer(tmp_path, tiny_run.model(), tiny_run.dataset(9), **settings)
    run.train()
    packs = tiny_run.packs(tiny_run.dataset(9, epochs=2), 8)  # two steps of two packs an epoch
    wanted = [token_means(run.model, rows_of(packs[first : first + 2])) for first in (2, 6)]
    lines = [line for line in run.state.log_history if "loss" in line]
    told = [[line[name] for name in ("mean_token_accuracy", "entropy")] for line in lines]
    assert told == [pytest.approx(means, rel=1e-5) for means in wanted]


def rows_of(packs) -> list[dict]:
    bounds = [(pack, a, b) for pack in packs for a, b in pairwise(pack.cu_seqlens)]
    return [{"input_ids": p.tokens[a:b].tolist(), "labels": p.labels[a:b]} for p, a, b in bounds]
