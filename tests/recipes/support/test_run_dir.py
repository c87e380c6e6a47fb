"""The run directory: a resume keeps the run's settings, and a kill leaves nothing unusable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from nopad.recipes import pretrain
from nopad.recipes.support.run_dir import RunDir, new_path
from nopad.trainer import checkpoint_manifest

STARTED = ["--budget", "64", "--prompt", "Once", "--learning-rate", "1e-4", "--save-every", "3"]


@pytest.fixture
def started(tmp_path, monkeypatch) -> Path:
    """A directory with two runs; the last one was started with STARTED."""
    monkeypatch.chdir(tmp_path)
    RunDir.from_args("pretrain", pretrain.parse_args([])).create()
    RunDir.from_args("pretrain", pretrain.parse_args(STARTED)).create()
    return tmp_path


def save(run_dir: RunDir, step: int, keep: int | None = None) -> None:
    run_dir.remove_unfinished()
    run_dir.unfinished_path(step).mkdir()
    (run_dir.unfinished_path(step) / "weights").write_text(str(step))
    run_dir.commit_checkpoint(step, keep)


def test_a_resumed_run_goes_on_as_it_was_started(started):
    before = vars(pretrain.parse_args(STARTED))
    last = Path("runs/pretrain-2")
    for resume in (["--resume"], ["--resume", str(last)], ["--output", str(last), "--resume"]):
        now = vars(pretrain.parse_args(resume))
        changes = {"resume": resume[1] if len(resume) == 2 else "last", "output": last}
        assert now == {**before, **changes}
        assert RunDir.from_args("pretrain", pretrain.parse_args(resume)).path == last


def test_a_resume_that_finds_no_run_says_where_it_looked_and_what_to_pass(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    looked = rf"{tmp_path}/runs has no folder pretrain-N; .* pass --resume FOLDER"
    with pytest.raises(ValueError, match=looked):
        pretrain.parse_args(["--resume"])
    run = RunDir.from_args("pretrain", pretrain.parse_args(["--output", "my runs/a"]))
    run.create()
    for wrong in ("my runs/a/checkpoint-3", "my runs"):
        with pytest.raises(ValueError, match=r"is not a run folder .*: pass --resume 'my runs/a'$"):
            pretrain.parse_args(["--resume", wrong])


def test_what_may_change_on_a_resume_changes_and_the_rest_is_refused_by_name(started):
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


@pytest.mark.parametrize("left", ["nothing", "checkpoint-3/weights", "unfinished-3/weights"])
def test_a_run_killed_before_its_first_checkpoint_begins_again(started, left, capsys):
    run = Path("runs/pretrain-2")
    (run / left).parent.mkdir(exist_ok=True)
    (run / left).write_text("cut short")
    RunDir(run, {}).log(1, {"loss": 4.5})
    args = pretrain.parse_args(["--resume"])
    run_dir = RunDir.from_args("pretrain", args)
    assert (args.resume, args.output, args.budget) == (None, run, 64)
    before = (run / "run.json").read_text()
    run_dir.create()
    assert "runs/pretrain-2 has no checkpoint yet: starting again" in capsys.readouterr().out
    assert (run / "log.jsonl").read_text() == "", "its steps will be taken again"
    assert (run / "run.json").read_text() == before


def test_a_run_whose_only_checkpoint_is_damaged_does_not_silently_begin_again(started):
    run = Path("runs/pretrain-2")
    save(RunDir(run, {}), 3)
    (run / "checkpoint-3" / "weights").write_text("damaged")
    args = pretrain.parse_args(["--resume"])
    run_dir = RunDir.from_args("pretrain", args)
    assert args.resume == "last"
    with pytest.raises(ValueError, match=r"checkpoint-3: weights is truncated or corrupted"):
        run_dir.latest_step()


@pytest.mark.parametrize("left", ["run.json", "checkpoint-5", "last.ckpt", "model.safetensors"])
def test_a_folder_that_holds_a_run_is_not_taken_for_another(tmp_path, left):
    (tmp_path / left).touch()
    with pytest.raises(ValueError, match=r"contains a run already: continue it with --resume"):
        new_path("train_hf", tmp_path)


@pytest.mark.parametrize("text", ['{"budget"', "[]", "7"])
def test_a_damaged_run_json_is_named(started, text):
    (started / "runs/pretrain-2/run.json").write_text(text)
    with pytest.raises(ValueError, match=r"pretrain-2/run\.json is damaged"):
        pretrain.parse_args(["--resume"])


def test_a_resume_into_another_folder_is_refused(started):
    with pytest.raises(ValueError, match=r"--resume runs/pretrain-1 and --output elsewhere differ"):
        pretrain.parse_args(["--resume", "runs/pretrain-1", "--output", "elsewhere"])
    same = pretrain.parse_args(["--resume", "runs/pretrain-1", "--output", "runs/pretrain-1/"])
    assert same.output == Path("runs/pretrain-1")


def test_a_log_line_torn_by_a_kill_is_dropped_with_the_steps_to_be_taken_again(tmp_path):
    run_dir = RunDir(tmp_path, {})
    for step in (1, 2, 3):
        run_dir.log(step, {"loss": step / 2})
    whole = (tmp_path / "log.jsonl").read_text().splitlines(keepends=True)
    for torn in ('{"step": 4, "lo', '{"step"', "\x00\x00\x00", "4", "{}"):
        (tmp_path / "log.jsonl").write_text("".join(whole) + torn)
        run_dir.truncate_log(2)
        assert (tmp_path / "log.jsonl").read_text() == "".join(whole[:2])
        run_dir.log(3, {"loss": 0.5})
        assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("keep", "left"), [(None, [5, 10, 15, 100]), (2, [15, 100]), (1, [100]), (9, [5, 10, 15, 100])]
)
def test_the_newest_checkpoints_are_kept_and_they_are_whole(tmp_path, keep, left):
    run_dir = RunDir(tmp_path, {})
    for step in (5, 10, 15, 100):
        save(run_dir, step, keep)
    found = sorted(tmp_path.iterdir(), key=lambda path: int(path.name.partition("-")[2]))
    assert [path.name for path in found] == [f"checkpoint-{step}" for step in left]
    assert [checkpoint_manifest.find_damage(path) for path in found] == [None] * len(left)
    assert run_dir.latest_step() == 100


@pytest.mark.parametrize(("keep", "left"), [(1, [300]), (2, [200, 300]), (None, [200, 300, 400])])
def test_a_damaged_checkpoint_that_was_passed_over_takes_no_place_of_a_whole_one(
    tmp_path, keep, left
):
    run_dir = RunDir(tmp_path, {})
    for step in (200, 400):
        save(run_dir, step)
    (run_dir.checkpoint_path(400) / "weights").write_text("damaged")
    assert run_dir.latest_step() == 200
    save(run_dir, 300, keep)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"checkpoint-{n}" for n in left]
    assert run_dir.latest_step() == 300


def test_what_saves_that_were_cut_short_have_left_is_cleared_away(tmp_path):
    (tmp_path / "unfinished-3" / "deep").mkdir(parents=True)
    RunDir(tmp_path, {}).remove_unfinished()
    assert list(tmp_path.iterdir()) == []


def test_of_two_runs_started_at_once_the_second_is_told_that_its_folder_is_taken(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    first, second = (
        RunDir.from_args("pretrain", pretrain.parse_args(["--seed", seed])) for seed in ("1", "2")
    )
    first.create()
    with pytest.raises(ValueError, match=r"another run has taken runs/pretrain-1 in the meantime"):
        second.create()
    assert json.loads((first.path / "run.json").read_text())["seed"] == 1
    first.create()


def test_what_a_run_was_started_with_is_written_once_and_at_once(tmp_path):
    RunDir(tmp_path, {"seed": 7}).create()
    RunDir(tmp_path, {"seed": 8}, created=True).create()
    assert json.loads((tmp_path / "run.json").read_text()) == {"seed": 7}
    assert [path.name for path in tmp_path.iterdir()] == ["run.json", "run.lock"]
