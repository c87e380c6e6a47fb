"""Weights of checkpoints: experts are saved in the layout of the hub, and have to come back."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_run
import torch
from char_words import char_tokenizer
from nopad.packing import PackedDataset
from nopad.trainer.with_hf import PackedTrainer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments


def train(folder, model, eval_dataset=None, **settings):
    args = TrainingArguments(
        str(folder), use_cpu=True, report_to=[], disable_tqdm=True, max_steps=3, save_steps=1,
        **settings,
    )  # fmt: skip
    return PackedTrainer(model, args, None, tiny_run.dataset(), eval_dataset=eval_dataset)


def test_a_resumed_mixture_of_experts_equals_the_uninterrupted_one(tmp_path):
    whole, resumed = tiny_run.mixture(), tiny_run.mixture()
    train(tmp_path, whole).train()
    train(tmp_path, resumed).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert tiny_run.digest(whole) == tiny_run.digest(resumed)


def test_the_best_mixture_of_experts_is_that_of_its_checkpoint(tmp_path):
    model = tiny_run.mixture()
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1}
    best |= {"metric_for_best_model": "loss", "greater_is_better": True}  # the first step's
    run = train(tmp_path, model, eval_dataset=tiny_run.dataset(9), **best)
    run.train()
    folder = Path(run.state.best_model_checkpoint)
    assert folder.name != "checkpoint-3"
    saved = AutoModelForCausalLM.from_pretrained(folder)
    assert tiny_run.digest(saved) == tiny_run.digest(model)


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path):
    train(tmp_path, tiny_run.model()).train()
    file = tmp_path / "checkpoint-1" / "model.safetensors"
    weights: dict[str, torch.Tensor] = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 weights of the model, such as model\.norm"):
        train(tmp_path, tiny_run.model()).train(str(tmp_path / "checkpoint-1"))


def test_a_checkpoint_has_the_tokenizer_of_the_data(tmp_path):
    tokenizer = char_tokenizer()
    data = PackedDataset([{"text": "abcdefgh"}] * 9, tokenizer=tokenizer, budget=16)
    run = train(tmp_path, tiny_run.model())
    run.train_dataset = data
    run.train()
    saved = AutoTokenizer.from_pretrained(tmp_path / "checkpoint-3")
    assert saved("abc").input_ids == tokenizer("abc").input_ids
