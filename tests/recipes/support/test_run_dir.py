"""The run directory: a resume keeps the run's settings, and a kill leaves nothing unusable."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import warm_python
from nopad.recipes import pretrain
from nopad.recipes.support.run_dir import RANK_VARIABLES, RunDir, is_main_process, new_path
from nopad.trainer import write_manifest

STARTED = ["--budget", "64", "--prompt", "Once", "--learning-rate", "1e-4", "--save-every", "3"]


def run_dir(*argv: str) -> RunDir:
    return RunDir("pretrain", pretrain.parse_args([*argv]))


@pytest.fixture
def started(tmp_path, monkeypatch) -> Path:
    """A directory with two runs; the last one was started with STARTED."""
    monkeypatch.chdir(tmp_path)
    run_dir().start(True)
    run_dir(*STARTED).start(True)
    return tmp_path


def test_a_resumed_run_goes_on_as_it_was_started(started):
    before = vars(pretrain.parse_args(STARTED))
    last = Path("runs/pretrain-2")
    for resume in (["--resume"], ["--resume", str(last)], ["--output", str(last), "--resume"]):
        now = vars(pretrain.parse_args(resume))
        changes = {"resume": resume[1] if len(resume) == 2 else "last", "output": last}
        assert now == {**before, **changes}
        assert run_dir(*resume).path == last


@pytest.mark.parametrize("wrong", [[], ["my runs/a/checkpoint-3"], ["my runs"], [""]])
def test_a_resume_that_finds_no_run_says_where_it_looked(wrong, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_dir("--output", "my runs/a").start(True)
    looked = tmp_path / (wrong[0] if wrong else "runs/pretrain-0")
    with pytest.raises(ValueError, match=rf"no run to resume in {looked}: pass the folder of"):
        pretrain.parse_args(["--resume", *wrong])


def test_what_may_not_change_on_a_resume_is_refused_by_name(started):
    args = pretrain.parse_args(["--resume", "--prompt", "There", "--save-every", "5"])
    assert (args.prompt, args.save_every, args.budget) == (["There"], 5, 64)
    (started / "new.yaml").write_text("learning-rate: 1e-3\n")
    for other, word in (
        (["--budget", "32"], r"--budget 64 \(now 32"),
        (["--data", "d"], "no --data"),
    ):
        with pytest.raises(ValueError, match=rf"pretrain-2 was started with {word}"):
            pretrain.parse_args(["--resume", *other])
    with pytest.raises(ValueError, match=r"with --learning-rate 0\.0001 \(now 0\.001\): omit"):
        pretrain.parse_args(["--resume", "--config", "new.yaml"])
    assert pretrain.parse_args(["--resume", "--learning-rate", "0.0001"]).learning_rate == 1e-4


@pytest.mark.parametrize("left", ["nothing", "checkpoint-3/weights"])
def test_a_run_killed_before_its_first_checkpoint_begins_again(started, left, capsys):
    path = Path("runs/pretrain-2")
    (path / left).parent.mkdir(exist_ok=True)
    (path / left).write_text("cut short")
    args = pretrain.parse_args(["--resume"])
    run = RunDir("pretrain", args)
    run.log(1, {"loss": 4.5})
    assert (args.resume, args.output, args.budget) == (None, path, 64)
    before = (path / "run.json").read_text()
    run.start(True)
    assert "runs/pretrain-2 has no checkpoint yet: starting again" in capsys.readouterr().out
    assert (path / "log.jsonl").read_text() == "", "its steps will be taken again"
    assert (path / "run.json").read_text() == before


def test_a_damaged_only_checkpoint_does_not_begin_the_run_again(started):
    path = Path("runs/pretrain-2/checkpoint-3")
    path.mkdir()
    (path / "weights").write_text("3")
    write_manifest(path)
    (path / "weights").write_text("damaged")
    args = pretrain.parse_args(["--resume"])
    RunDir("pretrain", args)
    assert args.resume == "last", "load_checkpoint names the damage"


@pytest.mark.parametrize("left", ["run.json", "checkpoint-5", "last.ckpt", "model.safetensors"])
def test_a_folder_that_holds_a_run_is_not_taken_for_another(tmp_path, left):
    (tmp_path / left).touch()
    with pytest.raises(ValueError, match=r"contains a run already: continue it with --resume"):
        new_path("train_hf", tmp_path)


@pytest.mark.parametrize("text", ['{"budget"', "[]", "7", "{}"])
def test_a_damaged_run_json_is_named(started, text):
    (started / "runs/pretrain-2/run.json").write_text(text)
    with pytest.raises(ValueError, match=r"pretrain-2/run\.json is damaged"):
        pretrain.parse_args(["--resume"])


def test_a_resume_into_another_folder_is_refused(started):
    with pytest.raises(ValueError, match=r"--resume runs/pretrain-1 and --output elsewhere differ"):
        pretrain.parse_args(["--resume", "runs/pretrain-1", "--output", "elsewhere"])
    same = pretrain.parse_args(["--resume", "runs/pretrain-1", "--output", "runs/pretrain-1/"])
    assert same.output == Path("runs/pretrain-1")


def test_a_log_line_torn_by_a_kill_is_dropped(started):
    run = run_dir("--resume")
    for step in (1, 2, 3):
        run.log(step, {"loss": step / 2})
    path = run.path / "log.jsonl"
    whole = path.read_text().splitlines(keepends=True)
    for torn in ('{"step": 4, "lo', '{"step"', "\x00\x00\x00", "4", "{}"):
        path.write_text("".join(whole) + torn)
        run.truncate_logs(2)
        assert path.read_text() == "".join(whole[:2])
        run.log(3, {"loss": 0.5})
        assert len(path.read_text().splitlines()) == 3


def test_of_two_runs_at_once_the_second_finds_its_folder_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = run_dir("--seed", "1"), run_dir("--seed", "2")
    first.start(True)
    with pytest.raises(ValueError, match=r"another run has taken runs/pretrain-1 in the meantime"):
        second.start(True)
    assert json.loads((first.path / "run.json").read_text())["seed"] == 1


RESUME = """
from nopad.recipes import pretrain
from nopad.recipes.support.run_dir import RunDir
RunDir("pretrain", pretrain.parse_args(["--resume"]))
"""


def test_a_run_that_is_being_trained_is_not_resumed(started, monkeypatch):
    run = run_dir("--resume")
    done = warm_python.run(["-c", RESUME], cwd=started)
    assert done.returncode and f"{run.path} is being trained by process" in done.stderr
    monkeypatch.setenv("RANK", "1")
    done = warm_python.run(["-c", RESUME], cwd=started)
    assert done.returncode == 0, "other ranks of the run do not lock"


@pytest.mark.parametrize("name", RANK_VARIABLES)
def test_the_main_process_is_the_one_with_rank_zero(name, monkeypatch):
    for other in RANK_VARIABLES:
        monkeypatch.delenv(other, raising=False)
    assert is_main_process()
    monkeypatch.setenv(name, "0")
    assert is_main_process()
    monkeypatch.setenv(name, "2")
    assert not is_main_process()


@pytest.mark.parametrize(
    ("script", "command"),
    [("/venv/bin/nopad", "nopad pretrain"), ("/x/nopad/__main__.py", "nopad pretrain"),
     ("my copy.py", "python 'my copy.py'")],
)  # fmt: skip
def test_the_command_that_resumes_is_what_a_shell_reads(script, command, monkeypatch):
    monkeypatch.setattr(sys, "argv", [script])
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    run = run_dir("--output", "my runs/a")
    assert run.resume_command() == f"{command} --resume 'my runs/a'"
