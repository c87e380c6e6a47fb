"""Errors that a user can fix are one line and status 2; all others keep their traceback."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import small_inputs
import torch
from nopad.recipes import pretrain
from nopad.recipes.support.run_recipe import exit_status


@pytest.fixture
def base(tmp_path) -> Path:
    return small_inputs.checkpoint(tmp_path)


@pytest.mark.parametrize("training", [False, True])
def test_an_error_in_the_middle_of_training_keeps_its_traceback(training, capsys):
    def train(args, run):
        run.training_started = training
        raise ValueError("disk\nfull")

    if training:
        with pytest.raises(ValueError, match="disk"):
            exit_status("pretrain", pretrain.parse_args, train, [])
    else:
        assert exit_status("pretrain", pretrain.parse_args, train, []) == 2
        assert capsys.readouterr().err == "pretrain: disk full\n"


def test_a_name_that_nopad_itself_lacks_keeps_its_traceback():
    def train(args, run):
        from nopad.trainer.with_lightning import no_such_name  # noqa: F401

    with pytest.raises(ImportError, match="no_such_name"):
        exit_status("pretrain", pretrain.parse_args, train, [])


@pytest.mark.parametrize("epochs", ["-1", "nan", "inf"])
def test_epochs_that_cannot_be_are_told_in_words_of_the_command_line(
    epochs, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    inputs = ["--data", small_inputs.documents(tmp_path), small_inputs.model(tmp_path)]
    inputs += ["--tokenizer", small_inputs.tokenizer(tmp_path), "--budget", "64"]
    assert small_inputs.status("train_hf", [*inputs, "--epochs", epochs]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"train_hf: --epochs {float(epochs)}: ") and last.endswith(
        "pass --steps"
    )


@pytest.mark.parametrize(
    ("package", "recipe"), [("lightning", "pretrain_lightning"), ("peft", "sft")]
)
def test_a_missing_package_is_one_line_that_installs_it(
    package, recipe, tmp_path, base, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for name in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    argv = [base, "--data", small_inputs.chats(tmp_path)]
    argv += ["--tokenizer", small_inputs.tokenizer(tmp_path)]
    assert small_inputs.status(recipe, argv + ["--lora", "4"] * (recipe == "sft")) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"{recipe}: ") and last.endswith(f": pip install {package}")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("recipe", "wrong", "message"),
    [
        ("train_hf", "--log-with wandb", "pip install wandb"),
        ("pretrain_lightning", "--accelerator gpu", "No supported gpu backend found!"),
        ("pretrain", "--attention flash_attention_2", "FlashAttention2 doesn't seem"),
    ],
)
@pytest.mark.skipif(torch.accelerator.is_available(), reason="is about machines without a GPU")
def test_what_this_machine_lacks_is_one_line(recipe, wrong, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.integrations.integration_utils.is_wandb_available", bool)
    argv = ["--data", small_inputs.documents(tmp_path), small_inputs.model(tmp_path)]
    argv += ["--tokenizer", small_inputs.tokenizer(tmp_path), "--budget", "64", "--steps", "1"]
    assert small_inputs.status(recipe, [*argv, *wrong.split()]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"{recipe}: ") and message in last


def test_chats_for_a_tokenizer_without_a_template_are_told_of_the_option(
    tmp_path, base, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    argv = ["--data", small_inputs.chats(tmp_path), base]
    argv += ["--tokenizer", small_inputs.tokenizer(tmp_path, template=False)]
    assert small_inputs.status("sft", argv) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("sft: chats.jsonl, line 1: messages need a tokenizer with a chat temp")
    assert "this one has none: pass --chat-template FILE to nopad sft, or use" in last


def test_a_signal_at_the_end_waits_for_the_last_save(capfd):
    before = signal.getsignal(signal.SIGUSR1)

    def train(args, run):
        os.kill(os.getpid(), signal.SIGUSR1)

    assert exit_status("pretrain", pretrain.parse_args, train, []) == 0
    assert "a second signal exits at once" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGUSR1) == before
