"""Recipes as a user runs them: real processes, YAML, tokenizers that lack something."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import small_inputs
import torch
from nopad.trainer.graceful_stop import SIGNALS

RECIPES = Path(__file__).parents[2] / "recipes"


def run(*command, folder: Path) -> subprocess.CompletedProcess:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    arguments = [sys.executable, *map(str, command)]
    return subprocess.run(
        arguments, env=env, cwd=folder, capture_output=True, text=True, timeout=300
    )


@pytest.fixture
def base(tmp_path) -> Path:
    """A checkpoint with weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(small_inputs.model(tmp_path))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_fine_tuning_with_adapters_learns_from_answers_only(tmp_path, base):
    (tmp_path / "sft.yaml").write_text(
        f"model: {base}\ndata: {small_inputs.chats(tmp_path)}\n"
        f"tokenizer: {small_inputs.tokenizer(tmp_path)}\nbudget: 64\n"
        "learning-rate: 0.01\nlora: 4\noutput: out\nlog_every: 1\n"
    )
    done = run(RECIPES / "sft.py", "--config", "sft.yaml", folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    assert "done: out" in done.stdout


@pytest.mark.parametrize("recipe", ["train_hf", "pretrain_lightning"])
def test_a_run_is_neither_written_over_nor_resumed_as_another(
    recipe, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    inputs = ["--data", small_inputs.documents(tmp_path), "--model", small_inputs.model(tmp_path)]
    inputs += ["--tokenizer", small_inputs.tokenizer(tmp_path), "--budget", "64"]
    in_process(recipe, [*inputs, "--steps", "2", "--save-every", "1"])
    run = tmp_path / "runs" / f"{recipe}-1"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=f"{recipe}-1 holds a run already"):
        in_process(recipe, [*inputs, "--steps", "2", "--output", run])
    for other in (["--steps", "4"], ["--learning-rate", "0.5"]):
        with pytest.raises(ValueError, match=f"{recipe}-1 was started with .*{other[0][2:5]}"):
            in_process(recipe, ["--resume", *other])
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    capsys.readouterr()
    in_process(recipe, ["--resume"])
    assert f"done: runs/{recipe}-1, step 2" in capsys.readouterr().out
    for path in run.glob("*.safetensors"):
        assert path.read_bytes() == before[path], "a run that was done took a step more"


@pytest.mark.parametrize(
    ("recipe", "broken"),
    [("train_hf", "nopad.trainer.fused.fuse_layers.fuse_layers"),
     ("pretrain_lightning", "pretrain_lightning.load_data")],
)  # fmt: skip
def test_a_run_that_fails_gives_the_signals_back(recipe, broken, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    inputs = ["--data", small_inputs.documents(tmp_path), "--model", small_inputs.model(tmp_path)]
    inputs += ["--tokenizer", small_inputs.tokenizer(tmp_path), "--budget", "64", "--steps", "1"]
    before = [signal.getsignal(number) for number in SIGNALS]
    importlib.import_module(f"nopad.recipes.{recipe}")
    monkeypatch.setattr(broken, lambda *_: 1 / 0)
    try:
        with pytest.raises(ZeroDivisionError):
            in_process(recipe, inputs)
        assert [signal.getsignal(number) for number in SIGNALS] == before
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)


def test_a_signal_in_the_last_save_is_not_answered_with_another_step(capfd):
    from nopad.recipes.support.arguments import heard_to_the_end

    before = signal.getsignal(signal.SIGUSR1)
    with heard_to_the_end():
        os.kill(os.getpid(), signal.SIGUSR1)
    assert "the run ends when it is saved; a second signal leaves" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGUSR1) == before


def in_process(recipe: str, arguments: list) -> None:
    """The recipe's main, here: it must raise before it trains."""
    importlib.import_module(f"nopad.recipes.{recipe}").main([*map(str, arguments)])


@pytest.mark.parametrize("recipe", ["pretrain", "train_hf", "pretrain_lightning"])
def test_text_for_a_tokenizer_without_an_end_token_is_refused(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = small_inputs.tokenizer(tmp_path, eos=None)
    common = ["--data", small_inputs.texts(tmp_path), "--model", small_inputs.model(tmp_path)]
    with pytest.raises(ValueError, match="no eos token to end documents with"):
        in_process(recipe, [*common, "--tokenizer", tokenizer, "--output", "out"])
    assert not (tmp_path / "out").exists()


def sft(tmp_path: Path, base: Path, data: Path, tokenizer: Path) -> None:
    in_process("sft", ["--model", base, "--data", data, "--tokenizer", tokenizer, "--output", "o"])


def test_chats_for_a_tokenizer_without_a_template_are_told_of_the_option(
    tmp_path, base, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    given = ["--data", small_inputs.chats(tmp_path), "--model", base]
    given += ["--tokenizer", small_inputs.tokenizer(tmp_path, template=False)]
    assert status_of("sft", given) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("sft: chats.jsonl, line 1: messages need a tokenizer with a chat temp")
    assert "this one has none: give sft.py --chat-template FILE, or take" in last


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path, monkeypatch):
    from transformers import AutoConfig, AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    config = AutoConfig.from_pretrained(small_inputs.model(tmp_path, vocab_size=90))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "small")
    tokenizer = small_inputs.tokenizer(tmp_path)
    with pytest.raises(ValueError, match="vocabulary of 90 is too small for the tokenizer's 102"):
        sft(tmp_path, tmp_path / "small", small_inputs.chats(tmp_path), tokenizer)


def test_an_unknown_name_in_the_yaml_is_named(tmp_path):
    (tmp_path / "sft.yaml").write_text("learning_rat: 1\n")
    with pytest.raises(ValueError, match=r"sft\.yaml: no setting learning_rat"):
        in_process("sft", ["--config", tmp_path / "sft.yaml"])


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("precision: bf17", "invalid choice: 'bf17'"),
        ("accumulation: 0", "--accumulation: '0': a whole number from 1"),
        ("budget: many", "--budget: 'many': a whole number from 1"),
        ("steps: 1.5", "--steps: '1.5': a whole number from 1"),
        ("warmup: -3", "--warmup: '-3': a whole number from 0"),
        ("workers: .nan", "--workers: 'nan': a whole number from 0"),
    ],
)
def test_a_value_in_the_yaml_is_checked_like_one_of_the_command_line(
    tmp_path, capsys, line, complaint
):
    (tmp_path / "sft.yaml").write_text(line + "\n")
    with pytest.raises(SystemExit, match="2"):
        in_process("sft", ["--config", tmp_path / "sft.yaml"])
    assert complaint in capsys.readouterr().err


def test_the_command_line_overrides_the_yaml(tmp_path):
    from nopad.recipes.support.hf_runner import hf_arguments
    from nopad.recipes.train_hf import options

    lines = "learning-rate: 1e-4\naccumulation: 4\ncheckpointing: true\nsteps: null\n"
    (tmp_path / "run.yaml").write_text(lines)
    args = options(["--config", str(tmp_path / "run.yaml"), "--accumulation", "2", "--data", "d"])
    settings = (args.learning_rate, args.accumulation, args.checkpointing, args.compile)
    assert settings == (1e-4, 2, True, False)
    assert hf_arguments(args).max_steps == -1


@pytest.mark.skipif(torch.accelerator.is_available(), reason="is about machines without a GPU")
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_every_precision_is_taken_without_a_gpu(precision, tmp_path):
    from nopad.recipes.support.hf_runner import hf_arguments
    from nopad.recipes.train_hf import options

    args = hf_arguments(options(["--precision", precision, "--output", str(tmp_path)]))
    assert args.device.type == "cpu"


def test_the_command_line_overrides_a_list_of_the_yaml(tmp_path):
    from nopad.recipes.pretrain import options

    (tmp_path / "run.yaml").write_text("prompt: [Once, There]\nbudget: 64\n")
    config = ["--config", str(tmp_path / "run.yaml")]
    assert options(config).prompt == ["Once", "There"]
    args = options([*config, "--prompt", "Hello", "--prompt", "You"])
    assert (args.prompt, args.budget, args.steps) == (["Hello", "You"], 64, 800)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("compile: false", r"started with --compile True \(now False\)"),
        ("steps: null", r"started with --steps 40 \(now None\)"),
        ("add_eos: 0", r"started with --add-eos False \(now 0\)"),
    ],
)
def test_a_resume_does_not_pass_over_what_the_yaml_takes_back(tmp_path, monkeypatch, line, told):
    from nopad.recipes.support.run_dir import RunFolder
    from nopad.recipes.train_hf import options

    monkeypatch.chdir(tmp_path)
    RunFolder.of("train_hf", options(["--compile", "--add-eos", "none", "--steps", "40"])).start()
    (tmp_path / "run.yaml").write_text(f"{line}\nresume: true\n")
    with pytest.raises(ValueError, match=told):
        options(["--config", "run.yaml"])
    (tmp_path / "run.yaml").write_text("resume: true\ncompile: true\neos: none\nworkers: null\n")
    args = options(["--config", "run.yaml"])
    assert (args.compile, args.add_eos, args.steps, args.workers) == (True, False, 40, 0)


def test_a_run_goes_on_with_the_yaml_it_was_started_with(tmp_path, monkeypatch):
    from nopad.recipes.support.run_dir import RunFolder
    from nopad.recipes.train_hf import options

    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("steps: null\ncompile: false\nbudget: 64\n")
    RunFolder.of("train_hf", options(["--config", "run.yaml"])).start()
    assert options(["--config", "run.yaml", "--resume"]).budget == 64


def test_null_in_the_yaml_is_the_default_and_false_is_for_what_can_be_off(tmp_path):
    from nopad.recipes.pretrain import options

    (tmp_path / "run.yaml").write_text("steps: null\nresume: false\nprompt: ~\n")
    config = ["--config", str(tmp_path / "run.yaml")]
    args = options(config)
    assert (args.steps, args.resume, args.prompt) == (800, None, None)
    assert options([*config, "--steps", "3"]).steps == 3
    (tmp_path / "run.yaml").write_text("add_eos: false\n")
    with pytest.raises(ValueError, match=r"run\.yaml: add_eos cannot be false; see --help"):
        options(config)


def test_a_whole_number_may_be_written_with_an_exponent(tmp_path):
    from nopad.recipes.train_hf import options

    (tmp_path / "run.yaml").write_text("steps: 1e3\nwarmup: 2.0\nbudget: 4096\n")
    args = options(["--config", str(tmp_path / "run.yaml")])
    assert (args.steps, args.warmup, args.budget) == (1000, 2, 4096)
    assert all(type(number) is int for number in (args.steps, args.warmup, args.budget))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"steps: 3\nmodel: [a, b\nseed: 1\n", r"run\.yaml, line 3 is no YAML: "),
        (b"steps: 3\n\tseed: 1\n", r"run\.yaml, line 2 is no YAML: "),
        (b"model: caf\xe9\n", r"run\.yaml is no YAML: .*utf-8"),
        (b"- steps\n", r"run\.yaml holds no `name: value` lines"),
    ],
)
def test_a_broken_yaml_file_is_named_with_its_line(tmp_path, text, told):
    (tmp_path / "run.yaml").write_bytes(text)
    with pytest.raises(ValueError, match=told) as caught:
        in_process("pretrain", ["--config", tmp_path / "run.yaml"])
    assert type(caught.value) is ValueError


@pytest.mark.parametrize("wrong", ["--devices 0", "--warmup -3", "--steps 0"])
def test_a_number_that_cannot_be_ends_before_any_work(wrong, capsys):
    with pytest.raises(SystemExit, match="2"):
        in_process("pretrain_lightning", wrong.split())
    assert f"{wrong.split()[0]}: '{wrong.split()[1]}': a whole number" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", ["pretrain", "sft"])
def test_an_attention_that_nobody_knows_ends_before_any_work(recipe, capsys):
    with pytest.raises(SystemExit, match="2"):
        in_process(recipe, ["--attention", "sdap"])
    told = capsys.readouterr().err.splitlines()[-1]
    assert "--attention: 'sdap': no such attention; there are " in told
    assert " nopad," in told and " sdpa" in told


@pytest.mark.parametrize("epochs", ["-1", "nan", "inf"])
def test_epochs_that_cannot_be_are_told_in_words_of_the_command_line(
    epochs, tmp_path, monkeypatch, capsys
):
    from nopad.recipes.support.arguments import exit_status
    from nopad.recipes.train_hf import main

    monkeypatch.chdir(tmp_path)
    inputs = ["--data", small_inputs.documents(tmp_path), "--model", small_inputs.model(tmp_path)]
    inputs += ["--tokenizer", small_inputs.tokenizer(tmp_path), "--budget", "64"]
    assert exit_status("train_hf", main, [*map(str, inputs), "--epochs", epochs]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith(f"train_hf: --epochs {float(epochs)}: ") and told.endswith("say --steps")


@pytest.mark.parametrize(
    ("package", "recipe", "extra"),
    [("lightning", "pretrain_lightning", "lightning"), ("peft", "sft", "lora")],
)
def test_a_package_that_is_lacking_is_one_line_with_its_extra(
    package, recipe, extra, tmp_path, base, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for name in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    given = ["--model", base, "--data", small_inputs.chats(tmp_path)]
    given += ["--tokenizer", small_inputs.tokenizer(tmp_path)]
    assert status_of(recipe, given + ["--lora", "4"] * (recipe == "sft")) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"{recipe}: ") and last.endswith(f": pip install 'nopad[{extra}]'")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("recipe", "wrong", "told"),
    [
        ("train_hf", "--log-with wandb", "pip install wandb"),
        ("pretrain_lightning", "--accelerator gpu", "No supported gpu backend found!"),
        ("pretrain", "--attention flash_attention_2", "'nopad[flash]'"),
    ],
)
@pytest.mark.skipif(torch.accelerator.is_available(), reason="is about machines without a GPU")
def test_what_is_not_to_be_had_here_is_one_line(recipe, wrong, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.integrations.integration_utils.is_wandb_available", bool)
    given = ["--data", small_inputs.documents(tmp_path), "--model", small_inputs.model(tmp_path)]
    given += ["--tokenizer", small_inputs.tokenizer(tmp_path), "--budget", "64", "--steps", "1"]
    assert status_of(recipe, [*given, *wrong.split()]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"{recipe}: ") and told in last


def test_a_name_that_nopad_itself_lacks_keeps_its_traceback():
    from nopad.recipes.support.arguments import exit_status

    def main(argv):
        from nopad.trainer.with_lightning import no_such_name  # noqa: F401

    with pytest.raises(ImportError, match="no_such_name"):
        exit_status("pretrain_lightning", main)


def test_options_are_read_without_the_libraries_of_training():
    code = "import argparse, loading, sys; parser = argparse.ArgumentParser();"
    code += "loading.shared_options(parser.add_argument, 64); parser.parse_args([]);"
    code += "sys.exit('transformers' in sys.modules)"
    recipes = Path(__file__).parents[2] / "recipes"
    assert subprocess.run([sys.executable, "-c", code], cwd=recipes).returncode == 0


def status_of(recipe: str, arguments: list) -> int:
    from nopad.recipes.support.arguments import exit_status

    main = importlib.import_module(f"nopad.recipes.{recipe}").main
    return exit_status(recipe, main, [*map(str, arguments)])


def test_a_model_that_is_nowhere_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises((ValueError, OSError), match="no/where"):
        in_process("train_hf", ["--model", "no/where", "--steps", "1"])
