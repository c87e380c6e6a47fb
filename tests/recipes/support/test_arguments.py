"""Arguments from the command line, from YAML and from the run that is resumed."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from nopad.recipes import pretrain, pretrain_lightning, sft, train_hf
from nopad.recipes.support.arguments import read_yaml
from nopad.recipes.support.run_dir import RunDir


def test_an_unknown_name_in_the_yaml_is_named(tmp_path):
    (tmp_path / "sft.yaml").write_text("learning_rat: 1\n")
    with pytest.raises(ValueError, match=r"sft\.yaml: unknown setting learning_rat; see --help"):
        sft.parse_args(["--config", str(tmp_path / "sft.yaml")])


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
        ("config: other.yaml", "unknown setting config"),
        ("checkpointing: 1", "checkpointing is 1; it must be true or false"),
    ],
)
def test_a_value_in_the_yaml_is_checked_like_one_of_the_command_line(tmp_path, line, complaint):
    (tmp_path / "sft.yaml").write_text(line + "\n")
    with pytest.raises(ValueError, match=re.escape(complaint)) as caught:
        sft.parse_args(["--config", str(tmp_path / "sft.yaml")])
    assert str(caught.value).startswith(str(tmp_path / "sft.yaml"))


def test_values_in_the_yaml_are_the_text_that_is_written(tmp_path):
    lines = "precision: no\nseed: 010\ntext_column: yes\nprompt: [on, 1:30]\n"
    (tmp_path / "run.yaml").write_text(lines)
    args = pretrain.parse_args(["--config", str(tmp_path / "run.yaml")])
    assert (args.precision, args.seed, args.text_column) == ("no", 10, "yes")
    assert args.prompt == ["on", "1:30"]


def test_the_command_line_overrides_the_yaml(tmp_path):
    lines = "learning-rate: 1e-4\naccumulation: 4\ncheckpointing: true\nsteps: null\n"
    (tmp_path / "run.yaml").write_text(lines)
    argv = ["--config", str(tmp_path / "run.yaml"), "--accumulation", "2", "--data", "d"]
    args = train_hf.parse_args(argv)
    settings = (args.learning_rate, args.accumulation, args.checkpointing, args.layers)
    assert settings == (1e-4, 2, True, "auto")
    assert train_hf.training_arguments(args).max_steps == -1


def test_the_command_line_overrides_a_list_of_the_yaml(tmp_path):
    (tmp_path / "run.yaml").write_text("prompt: [Once, There]\nbudget: 64\n")
    config = ["--config", str(tmp_path / "run.yaml")]
    assert pretrain.parse_args(config).prompt == ["Once", "There"]
    args = pretrain.parse_args([*config, "--prompt", "Hello", "--prompt", "You"])
    assert (args.prompt, args.budget, args.steps) == (["Hello", "You"], 64, 480)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("layers: stock", r"started with --layers compiled \(now stock\)"),
        ("steps: 41", r"started with --steps 40 \(now 41\)"),
        ("add_eos: 0", r"started with --add-eos False \(now 0\)"),
    ],
)
def test_a_resume_does_not_ignore_what_the_yaml_resets(tmp_path, monkeypatch, line, message):
    monkeypatch.chdir(tmp_path)
    args = train_hf.parse_args(["--layers", "compiled", "--add-eos", "none", "--steps", "40"])
    RunDir("train_hf", args).start(True)
    (tmp_path / "run.yaml").write_text(f"{line}\nresume: runs/train_hf-1\n")
    with pytest.raises(ValueError, match=message):
        train_hf.parse_args(["--config", "run.yaml"])
    (tmp_path / "run.yaml").write_text("layers: compiled\nadd_eos: none\nworkers: null\n")
    args = train_hf.parse_args(["--config", "run.yaml", "--resume"])
    assert (args.layers, args.add_eos, args.steps, args.workers) == ("compiled", False, 40, 0)


def test_a_run_resumes_with_the_yaml_it_was_started_with(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("steps: null\ncheckpointing: false\nbudget: 64\n")
    RunDir("train_hf", train_hf.parse_args(["--config", "run.yaml"])).start(True)
    assert train_hf.parse_args(["--config", "run.yaml", "--resume"]).budget == 64


def test_null_in_the_yaml_is_the_default(tmp_path):
    (tmp_path / "run.yaml").write_text("steps: null\nresume:\nprompt: ~\n")
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
        (b"steps: 3\nmodel: [a, b\nseed: 1\n", r"(?s)run\.yaml is not valid YAML: .*line 3"),
        (b"steps: 3\n\tseed: 1\n", r"(?s)run\.yaml is not valid YAML: .*line 2"),
        (b"model: caf\xe9\n", r"run\.yaml is not valid YAML: .*utf-8"),
        (b"- steps\n", r"run\.yaml must consist of lines `name: value`"),
    ],
)
def test_a_broken_yaml_file_is_named_with_its_line(tmp_path, text, message):
    (tmp_path / "run.yaml").write_bytes(text)
    with pytest.raises(ValueError, match=message) as caught:
        pretrain.parse_args(["--config", str(tmp_path / "run.yaml")])
    assert type(caught.value) is ValueError


@pytest.mark.parametrize("wrong", ["--devices 0", "--warmup -3", "--steps 0"])
def test_an_impossible_number_is_refused_before_any_work(wrong, capsys):
    with pytest.raises(SystemExit, match="2"):
        pretrain_lightning.parse_args(wrong.split())
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


def test_a_run_of_another_recipe_is_not_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    RunDir("train_hf", train_hf.parse_args([])).start(True)
    message = r"runs/train_hf-1 is a run of train_hf\.py: resume it with that recipe"
    for recipe in (pretrain, sft, pretrain_lightning):
        with pytest.raises(ValueError, match=message):
            recipe.parse_args(["--resume", "runs/train_hf-1"])


@pytest.mark.parametrize("recipe", [pretrain, sft])
def test_an_unknown_attention_is_refused_before_any_work(recipe, capsys):
    with pytest.raises(SystemExit, match="2"):
        recipe.parse_args(["--attention", "sdap"])
    message = capsys.readouterr().err.splitlines()[-1]
    assert "--attention: 'sdap' is not an attention implementation; choose from " in message
    assert " nopad," in message and " sdpa" in message


def test_options_are_read_without_the_libraries_of_training():
    code = (
        "import argparse, sys\n"
        "from nopad.recipes.support.arguments import add_packing_options\n"
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
        (bomb(), "must consist of lines `name: value`"),
        ("a: &a {b: 1}\nc: {<<: *a}\n", "must consist of lines `name: value`"),
        ("? [a, b]\n: 1\n", "must consist of lines `name: value`"),
        ("[" * 5000, "not valid YAML"),
        ("budget: [[1]]\n", "must consist of lines `name: value`"),
        ("budget: {a: 1}\n", "must consist of lines `name: value`"),
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
    RunDir("pretrain", args).start(True)
    args = pretrain.parse_args(["--steps", "5", *output])
    assert args.resume == str(tmp_path / "run") == str(args.output)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    with pytest.raises(ValueError, match="contains a run already"):
        RunDir("pretrain", pretrain.parse_args(["--steps", "5", *output]))
