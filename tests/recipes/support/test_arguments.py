"""Arguments from the command line, from YAML and from the run that is resumed."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from nopad.recipes import pretrain, pretrain_lightning, sft, train_hf
from nopad.recipes.support.arguments import read_yaml
from nopad.recipes.support.hf_runner import training_arguments
from nopad.recipes.support.run_dir import RunDir


def test_an_unknown_name_in_the_yaml_is_named(tmp_path):
    (tmp_path / "sft.yaml").write_text("learning_rat: 1\n")
    with pytest.raises(ValueError, match=r"sft\.yaml: unknown setting learning_rat; see --help"):
        sft.main(["--config", str(tmp_path / "sft.yaml")])


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("precision: bf17", "invalid choice: 'bf17'"),
        ("accumulation: 0", "--accumulation: '0': pass an integer >= 1"),
        ("budget: many", "--budget: 'many': pass an integer >= 1"),
        ("steps: 1.5", "--steps: '1.5': pass an integer >= 1"),
        ("warmup: -3", "--warmup: '-3': pass an integer >= 0"),
        ("workers: .nan", "--workers: '.nan': pass an integer >= 0"),
        ("add_eos: false", "--add-eos: 'false': pass a token id, or none"),
        ("learning_rate: -1", "--learning-rate: '-1': pass a number >= 0"),
        ("steps: [1, 2]", "steps takes one value, not a list"),
        ("config: other.yaml", "a settings file cannot name another"),
        ("compile: 1", "compile is 1; it must be true or false"),
    ],
)
def test_a_value_in_the_yaml_is_checked_like_one_of_the_command_line(tmp_path, line, complaint):
    (tmp_path / "sft.yaml").write_text(line + "\n")
    with pytest.raises(ValueError, match=re.escape(complaint)) as caught:
        sft.main(["--config", str(tmp_path / "sft.yaml")])
    assert str(caught.value).startswith(str(tmp_path / "sft.yaml"))


def test_values_in_the_yaml_are_the_text_that_is_written(tmp_path):
    lines = "precision: no\nseed: 010\ntext_column: yes\nprompt: [on, 1:30]\n"
    (tmp_path / "run.yaml").write_text(lines)
    args = pretrain.parse_args(["--config", str(tmp_path / "run.yaml")])
    assert (args.precision, args.seed, args.text_column) == ("no", 10, "yes")
    assert args.prompt == ["on", "1:30"]
    for line in ("prompt: []", "prompt: [a, null]"):
        (tmp_path / "run.yaml").write_text(line)
        with pytest.raises(ValueError, match="prompt is a list without values, or with null in it"):
            pretrain.parse_args(["--config", str(tmp_path / "run.yaml")])


def test_the_command_line_overrides_the_yaml(tmp_path):
    lines = "learning-rate: 1e-4\naccumulation: 4\ncheckpointing: true\nsteps: null\n"
    (tmp_path / "run.yaml").write_text(lines)
    argv = ["--config", str(tmp_path / "run.yaml"), "--accumulation", "2", "--data", "d"]
    args = train_hf.parse_args(argv)
    settings = (args.learning_rate, args.accumulation, args.checkpointing, args.compile)
    assert settings == (1e-4, 2, True, False)
    assert training_arguments(args).max_steps == -1


def test_the_command_line_overrides_a_list_of_the_yaml(tmp_path):
    (tmp_path / "run.yaml").write_text("prompt: [Once, There]\nbudget: 64\n")
    config = ["--config", str(tmp_path / "run.yaml")]
    assert pretrain.parse_args(config).prompt == ["Once", "There"]
    args = pretrain.parse_args([*config, "--prompt", "Hello", "--prompt", "You"])
    assert (args.prompt, args.budget, args.steps) == (["Hello", "You"], 64, 480)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("compile: false", r"started with --compile True \(now False\)"),
        ("steps: null", r"started with --steps 40 \(now None\)"),
        ("add_eos: 0", r"started with --add-eos False \(now 0\)"),
    ],
)
def test_a_resume_does_not_ignore_what_the_yaml_resets(tmp_path, monkeypatch, line, message):
    monkeypatch.chdir(tmp_path)
    args = train_hf.parse_args(["--compile", "--add-eos", "none", "--steps", "40"])
    RunDir.from_args("train_hf", args).create()
    (tmp_path / "run.yaml").write_text(f"{line}\nresume: true\n")
    with pytest.raises(ValueError, match=message):
        train_hf.parse_args(["--config", "run.yaml"])
    (tmp_path / "run.yaml").write_text(
        "resume: true\ncompile: true\nadd_eos: none\nworkers: null\n"
    )
    args = train_hf.parse_args(["--config", "run.yaml"])
    assert (args.compile, args.add_eos, args.steps, args.workers) == (True, False, 40, 0)


def test_a_run_resumes_with_the_yaml_it_was_started_with(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("steps: null\ncompile: false\nbudget: 64\n")
    RunDir.from_args("train_hf", train_hf.parse_args(["--config", "run.yaml"])).create()
    assert train_hf.parse_args(["--config", "run.yaml", "--resume"]).budget == 64


def test_null_in_the_yaml_is_the_default_and_false_is_for_what_can_be_off(tmp_path):
    (tmp_path / "run.yaml").write_text("steps: null\nresume: false\nprompt: ~\n")
    config = ["--config", str(tmp_path / "run.yaml")]
    args = pretrain.parse_args(config)
    assert (args.steps, args.resume, args.prompt) == (480, None, None)
    assert pretrain.parse_args([*config, "--steps", "3"]).steps == 3


def test_a_whole_number_may_be_written_with_an_exponent(tmp_path):
    (tmp_path / "run.yaml").write_text("steps: 1e3\nwarmup: 2.0\nbudget: 4096\n")
    args = train_hf.parse_args(["--config", str(tmp_path / "run.yaml")])
    assert (args.steps, args.warmup, args.budget) == (1000, 2, 4096)
    assert all(type(number) is int for number in (args.steps, args.warmup, args.budget))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"steps: 3\nmodel: [a, b\nseed: 1\n", r"run\.yaml, line 3 is not valid YAML: "),
        (b"steps: 3\n\tseed: 1\n", r"run\.yaml, line 2 is not valid YAML: "),
        (b"model: caf\xe9\n", r"run\.yaml is not valid YAML: .*utf-8"),
        (b"- steps\n", r"run\.yaml must consist of `name: value` lines"),
    ],
)
def test_a_broken_yaml_file_is_named_with_its_line(tmp_path, text, message):
    (tmp_path / "run.yaml").write_bytes(text)
    with pytest.raises(ValueError, match=message) as caught:
        pretrain.main(["--config", str(tmp_path / "run.yaml")])
    assert type(caught.value) is ValueError


@pytest.mark.parametrize("wrong", ["--devices 0", "--warmup -3", "--steps 0"])
def test_an_impossible_number_is_refused_before_any_work(wrong, capsys):
    with pytest.raises(SystemExit, match="2"):
        pretrain_lightning.main(wrong.split())
    assert (
        f"{wrong.split()[0]}: '{wrong.split()[1]}': pass an integer >= " in capsys.readouterr().err
    )


@pytest.mark.parametrize("wrong", ["--clip -1", "--clip 0", "--clip nan", "--weight-decay -1",
                                   "--weight-decay nan", "--learning-rate inf"])  # fmt: skip
def test_a_number_that_would_train_wrongly_is_refused(wrong, capsys):
    """A negative clip turns every gradient around; clipping to 0 removes it."""
    option, value = wrong.split()
    with pytest.raises(SystemExit, match="2"):
        pretrain.parse_args([f"{option}={value}"])
    assert f"{option}: '{value}': pass a number " in capsys.readouterr().err


def test_an_empty_name_is_not_the_working_directory(capsys):
    with pytest.raises(ValueError, match="--resume '' names no folder"):
        pretrain.parse_args(["--resume", ""])
    with pytest.raises(SystemExit, match="2"):
        pretrain.parse_args(["--output", ""])
    assert "the name is empty: pass a folder" in capsys.readouterr().err


def test_a_run_of_another_recipe_is_not_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    RunDir.from_args("train_hf", train_hf.parse_args([])).create()
    message = r"runs/train_hf-1 is a run of train_hf\.py: resume it with that"
    for recipe in (pretrain, sft, pretrain_lightning):
        with pytest.raises(ValueError, match=message):
            recipe.parse_args(["--resume", "runs/train_hf-1"])


@pytest.mark.parametrize("recipe", [pretrain, sft])
def test_an_unknown_attention_is_refused_before_any_work(recipe, capsys):
    with pytest.raises(SystemExit, match="2"):
        recipe.main(["--attention", "sdap"])
    message = capsys.readouterr().err.splitlines()[-1]
    assert "--attention: 'sdap' is not an attention implementation; choose from " in message
    assert " nopad," in message and " sdpa" in message


def test_options_are_read_without_the_libraries_of_training():
    code = (
        "import argparse, sys\n"
        "from nopad.recipes.support.data_and_model import add_packing_options\n"
        "parser = argparse.ArgumentParser()\n"
        "add_packing_options(parser.add_argument, 64)\n"
        "parser.parse_args([])\n"
        "sys.exit('transformers' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def bomb(levels: int = 30) -> str:
    """A few hundred bytes of YAML that stand for 9 ** levels values."""
    lines = ["a0: &a0 [1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)]
    return "\n".join([*lines, f"budget: *a{levels - 1}"])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (bomb(), "line 2 is not valid YAML: aliases are not supported"),
        ("a: &a {b: 1}\nc: {<<: *a}\n", "line 2 is not valid YAML: aliases are not supported"),
        ("[" * 5000, r"nested too deeply|not valid YAML"),
        ("budget: [[1]]\n", "budget must be a value or a list of values"),
        ("budget: {a: 1}\n", "budget must be a value or a list of values"),
        ("budget: 512\nbudget: 1024\n", "budget appears twice"),
        ("learning-rate: 1\nlearning_rate: 2\n", "learning_rate appears twice"),
    ],
)
def test_yaml_that_grows_or_contradicts_itself_is_refused_at_once(tmp_path, text, told):
    path = tmp_path / "sft.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=told):
        read_yaml(path)


def test_workers_that_were_restarted_resume_the_run_in_their_folder(tmp_path, monkeypatch):
    output = ["--output", str(tmp_path / "run")]
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(ValueError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        pretrain.parse_args(output)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    with pytest.raises(ValueError, match="--max-restarts needs --output"):
        pretrain.parse_args([])
    assert pretrain.parse_args(["--steps", "5", *output]).resume is None
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    args = pretrain.parse_args(["--steps", "5", *output])
    assert args.resume is None, "killed before the first step: it starts as a new run"
    RunDir.from_args("pretrain", args).create()
    args = pretrain.parse_args(["--steps", "5", *output])
    assert args.resume == str(tmp_path / "run") == str(args.output)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    with pytest.raises(ValueError, match="contains a run already"):
        RunDir.from_args("pretrain", pretrain.parse_args(["--steps", "5", *output]))
