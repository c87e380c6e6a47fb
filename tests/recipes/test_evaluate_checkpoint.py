"""The recipe that evaluates a saved checkpoint, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"
pytest.importorskip("lm_eval", reason="the harness is the extra `eval`")

from nopad.recipes import evaluate_checkpoint  # noqa: E402


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from small_checkpoint import random_model, small_tokenizer

    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = small_tokenizer()
    random_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def data(tmp_path):
    rows = [{"question": f"Lily saw {i} cats.", "answer": f"#### {i}"} for i in range(5)]
    path = tmp_path / "test.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_it_evaluates_and_prints_metrics(checkpoint, data, capsys):
    status = evaluate_checkpoint.run(
        ["--model", str(checkpoint), "--data", str(data), "--prompt", "{question}\\n", "--limit",
         "4", "--reference", "{answer}", "--regex", "#### ([0-9]+)", "--max-tokens", "6"]
    )  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert status == 0 and found["eval/examples"] == 4 and found["eval/exact"] == 0
    assert "eval/extracted" in found and " -> " in lines[0]


def test_a_missing_column_is_named_with_file_and_line(checkpoint, data, capsys):
    status = evaluate_checkpoint.run(["--model", str(checkpoint), "--data", str(data)])
    told = capsys.readouterr().err
    assert status == 2 and "test.jsonl:1 has no 'prompt'" in told and "--prompt" in told


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(["--regex", "("], "no regular expression"), (["--model", "/no/such"], "no folder /no/such")],
)
def test_what_a_user_can_mend_is_one_line(checkpoint, data, capsys, wrong, word):
    given = ["--model", str(checkpoint), "--data", str(data), "--prompt", "{question}"]
    assert evaluate_checkpoint.run([*given, "--reference", "{answer}", *wrong]) == 2
    told = capsys.readouterr().err
    assert word in told and len(told.splitlines()) == 1


@pytest.mark.parametrize(
    "template", ["Q: {}", "{question.x}", "{question[a]}", "{question", "{question:d}"]
)
def test_a_template_that_does_not_fit_is_named_with_file_and_line(data, capsys, template):
    status = evaluate_checkpoint.run(["--model", "m", "--data", str(data), "--prompt", template])
    told = capsys.readouterr().err
    assert status == 2 and f"--prompt {template!r} does not fit {data}:1: " in told


@pytest.mark.parametrize(
    ("text", "told"),
    [(b"[1, 2]\n", ":3 is no JSON object"), (b"{\n", ":3 is no JSON object"),
     (b"caf\xe9\n", " is not UTF-8")],
)  # fmt: skip
def test_a_line_that_cannot_be_read_is_named(tmp_path, capsys, text, told):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"prompt": "a", "completion": "b"}\n\n' + text)
    assert evaluate_checkpoint.run(["--model", "m", "--data", str(path)]) == 2
    assert f"evaluate_checkpoint: {path}{told}" in capsys.readouterr().err


def test_blank_lines_are_passed_over(data):
    data.write_text("\n" + data.read_text().replace("\n", "\n\n"))
    given = ["--model", "m", "--data", str(data), "--prompt", "{question}", "--limit", "4"]
    found = evaluate_checkpoint.examples(
        evaluate_checkpoint.options([*given, "--reference", "{answer}"])
    )
    assert [example.reference for example in found] == [f"#### {i}" for i in range(4)]


def test_help_tells_no_default_where_there_is_none(capsys):
    with pytest.raises(SystemExit):
        evaluate_checkpoint.options(["--help"])
    told = capsys.readouterr().out
    assert "default: None" not in told and "default: []" not in told and "default: 256" in told


def test_an_example_that_failed_is_status_one(checkpoint, data, capsys):
    given = ["--model", str(checkpoint), "--data", str(data), "--reference", "{answer}"]
    long = "Lily " * 900
    status = evaluate_checkpoint.run([*given, "--prompt", long, "--max-tokens", "2"])
    told = capsys.readouterr().out
    assert status == 1 and json.loads(told.splitlines()[-1])["eval/failed"] == 5
    assert "error: example 0: " in told and "max_length" in told


def test_a_deadline_that_lets_nothing_finish_is_status_one(checkpoint, data, capsys):
    given = ["--model", str(checkpoint), "--data", str(data), "--prompt", "{question}"]
    assert evaluate_checkpoint.run([*given, "--reference", "{answer}", "--deadline", "1e-6"]) == 1
    told = capsys.readouterr()
    assert json.loads(told.out.splitlines()[-1])["eval/unfinished"] == 5
    assert (
        told.err.strip() == "evaluate_checkpoint: nothing was finished in 1e-06 s: raise --deadline"
    )
