"""`nopad eval` as a user runs it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import warm_python

pytest.importorskip("lm_eval", reason="lm_eval is not installed")


def nopad(*arguments) -> subprocess.CompletedProcess:
    return warm_python.run(["-m", "nopad", "eval", *map(str, arguments)], timeout=200)


def test_a_checkpoint_is_evaluated_on_tasks_of_ones_own(checkpoint_dir, tmp_path):
    from lm_tasks import write_tasks

    names = write_tasks(tmp_path, 6)
    output = tmp_path / "results" / "all.json"
    done = nopad(
        checkpoint_dir, "--tasks", ", ".join(names), "--include-path", tmp_path,
        "--limit", 3, "--system-instruction", "Look around.", "--device", "cpu", "--output", output,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["tiny_choice", "1", "none", "acc"] in [row[:4] for row in rows], done.stdout
    numbers = json.loads(done.stdout.splitlines()[-1])
    assert set(numbers) == set(names) and 0 <= numbers["tiny_choice"]["acc,none"] <= 1
    written = json.loads(output.read_text())
    assert len(written["samples"]["tiny_write"]) == 3
    prompt = written["samples"]["tiny_write"][0]["arguments"][0][0]
    assert prompt.startswith("Look around.")
    assert written["config"]["model"] == str(checkpoint_dir) and written["config"]["limit"] == 3
    assert written["config"]["dtype"] == "torch.float32"


def test_what_a_user_can_mend_is_one_line(tmp_path):
    missing = nopad(tmp_path / "nothing", "--tasks", "x", "--device", "cpu")
    message = f"nopad eval: there is no folder {tmp_path / 'nothing'}"
    assert missing.returncode == 2 and missing.stderr.strip().splitlines()[-1] == message


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (["--device", "frog"], "frog"),
        (["--include-path", "nowhere"], "nowhere"),
        (["--tasks", ","], "names no task"),
        (["--num-fewshot", "1000"], "tiny_choice has 3 few-shot examples, num_fewshot is 1000"),
        (["--num-fewshot", "4"], "tiny_choice has 3 few-shot examples, num_fewshot is 4"),
    ],
)
def test_a_setting_that_cannot_be_is_named(checkpoint_dir, tmp_path, wrong, word):
    from lm_tasks import write_tasks
    from nopad.cli.evaluate import main

    given = [str(checkpoint_dir), "--tasks", write_tasks(tmp_path, 4)[0]]
    with pytest.raises(ValueError, match=word):
        main([*given, "--include-path", str(tmp_path), *wrong])


@pytest.mark.parametrize("wrong", ["--limit 0", "--limit -1", "--limit nan", "--max-model-len 0"])
def test_a_number_that_cannot_be_ends_before_any_work(wrong, capsys):
    from nopad.cli.evaluate import main

    with pytest.raises(SystemExit) as ended:
        main(["no-such-model", "--tasks", "x", *wrong.split()])
    assert ended.value.code == 2 and wrong.split()[0] in capsys.readouterr().err


@pytest.mark.parametrize(("text", "limit"), [("3", 3), ("200.0", 200), ("0.5", 0.5), ("1", 1)])
def test_a_limit_is_a_number_of_documents_or_a_share(text, limit):
    from nopad.cli.evaluate import parse_args

    limit_arg = parse_args(["m", "--tasks", "x", "--limit", text]).limit
    assert limit_arg == limit and type(limit_arg) is type(limit)


def test_chat_without_a_template_is_told_before_the_model_is_loaded(
    checkpoint_dir, tmp_path, monkeypatch
):
    from nopad.cli import evaluate
    from nopad.inference import harness
    from small_checkpoint import small_tokenizer

    tokenizer = small_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "plain")
    monkeypatch.setattr(evaluate, "load_model", None)
    monkeypatch.setattr(harness, "find_tasks", lambda *_: None)
    given = [str(checkpoint_dir), "--tasks", "x", "--tokenizer", str(tmp_path / "plain")]
    with pytest.raises(ValueError, match="--chat: the tokenizer has no chat template"):
        evaluate.main([*given, "--chat"])


def test_task_files_may_lie_at_home(monkeypatch):
    from nopad.cli.evaluate import parse_args

    monkeypatch.setenv("HOME", "/home/lily")
    args = parse_args(["m", "--tasks", "x", "--include-path", "~/tasks"])
    assert args.include_path == "/home/lily/tasks"


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"limit": 0}, "limit is 0"),
        ({"max_length": 0}, "max_length is 0"),
        ({"chat": True}, "no chat template"),
    ],
)
def test_in_python_a_setting_that_cannot_be_is_named_too(wrong, word):
    from nopad.inference.harness import Harness
    from small_checkpoint import random_model, small_tokenizer

    tokenizer = small_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=word):
        Harness(random_model(tokenizer), tokenizer, ["x"], task_manager=object(), **wrong)


def test_an_unknown_task_is_told_with_its_likeliest_name(tmp_path, monkeypatch):
    from lm_tasks import write_tasks
    from nopad.inference.harness import harness

    write_tasks(tmp_path, 4)
    few = harness.TaskManager
    monkeypatch.setattr(  # indexing lm_eval's own tasks takes seconds
        harness, "TaskManager", lambda include_path, **_: few(
            include_path=include_path, include_defaults=False
        )
    )  # fmt: skip
    with pytest.raises(ValueError, match="no task 'tiny_chioce': did you mean tiny_choice"):
        harness.find_tasks(["tiny_chioce"], str(tmp_path))
    assert harness.find_tasks(["tiny_choice"], str(tmp_path)).load(["tiny_choice"])["tasks"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="it is a device of Linux")
def test_a_full_disk_hides_no_score(checkpoint_dir, tmp_path, capsys):
    from lm_tasks import write_tasks
    from nopad.cli.evaluate import main

    given = ["--tasks", write_tasks(tmp_path, 4)[0], "--include-path", str(tmp_path)]
    with pytest.raises(OSError, match=r"^--output /dev/full is not written"):
        main([str(checkpoint_dir), *given, "--device", "cpu", "--output", "/dev/full"])
    assert "acc,none" in json.loads(capsys.readouterr().out.splitlines()[-1])["tiny_choice"]
