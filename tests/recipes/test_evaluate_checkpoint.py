"""The recipe that evaluates a saved checkpoint, as a user runs it."""

from __future__ import annotations

import json

import pytest
from nopad.recipes import evaluate_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from small_checkpoint import save_checkpoint

    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def data(tmp_path):
    rows = [{"question": f"Lily saw {i} cats.", "answer": f"#### {i}"} for i in range(5)]
    path = tmp_path / "test.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_it_evaluates_and_prints_metrics(checkpoint, data, capsys):
    status = evaluate_checkpoint.run(
        [str(checkpoint), "--data", str(data), "--prompt", "{question}\\n", "--limit",
         "4", "--reference", "{answer}", "--regex", "#### ([0-9]+)", "--max-tokens", "6"]
    )  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    metrics = json.loads(lines[-1])
    assert status == 0 and metrics["eval/examples"] == 4 and metrics["eval/exact"] == 0
    assert "eval/regex_match" in metrics and " -> " in lines[0]


def test_a_missing_column_is_named_with_file_and_line(checkpoint, data, capsys):
    status = evaluate_checkpoint.run([str(checkpoint), "--data", str(data)])
    output = capsys.readouterr().err
    assert status == 2 and "test.jsonl:1 has no 'prompt'" in output and "--prompt" in output


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (["--regex", "("], "is not a regular expression"),
        (["--tokenizer", "/no/such"], "no folder /no/such"),
    ],
)
def test_an_error_that_a_user_can_fix_is_one_line(checkpoint, data, capsys, wrong, word):
    argv = [str(checkpoint), "--data", str(data), "--prompt", "{question}"]
    assert evaluate_checkpoint.run([*argv, "--reference", "{answer}", *wrong]) == 2
    output = capsys.readouterr().err
    assert word in output and len(output.splitlines()) == 1


@pytest.mark.parametrize(
    "template", ["Q: {}", "{question.x}", "{question[a]}", "{question", "{question:d}"]
)
def test_a_template_that_does_not_fit_is_named_with_file_and_line(data, capsys, template):
    status = evaluate_checkpoint.run(["m", "--data", str(data), "--prompt", template])
    output = capsys.readouterr().err
    assert status == 2 and f"--prompt {template!r} does not fit {data}:1: " in output


@pytest.mark.parametrize(
    ("text", "message"),
    [(b"[1, 2]\n", ":3 is not a JSON object"), (b"{\n", ":3 is not a JSON object"),
     (b"caf\xe9\n", " is not UTF-8")],
)  # fmt: skip
def test_a_line_that_cannot_be_read_is_named(tmp_path, capsys, text, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"prompt": "a", "completion": "b"}\n\n' + text)
    assert evaluate_checkpoint.run(["m", "--data", str(path)]) == 2
    assert f"evaluate_checkpoint: {path}{message}" in capsys.readouterr().err


def test_blank_lines_are_skipped(data):
    data.write_text("\n" + data.read_text().replace("\n", "\n\n"))
    argv = ["m", "--data", str(data), "--prompt", "{question}", "--limit", "4"]
    examples = evaluate_checkpoint.load_examples(
        evaluate_checkpoint.parse_args([*argv, "--reference", "{answer}"])
    )
    assert [example.reference for example in examples] == [f"#### {i}" for i in range(4)]


def test_help_tells_no_default_where_there_is_none(capsys):
    with pytest.raises(SystemExit):
        evaluate_checkpoint.parse_args(["--help"])
    output = capsys.readouterr().out
    assert (
        "default: None" not in output and "default: []" not in output and "default: 256" in output
    )


def test_an_example_that_failed_is_status_one(checkpoint, data, capsys):
    argv = [str(checkpoint), "--data", str(data), "--reference", "{answer}"]
    long = "Lily " * 900
    status = evaluate_checkpoint.run([*argv, "--prompt", long, "--max-tokens", "2"])
    output = capsys.readouterr().out
    assert status == 1 and json.loads(output.splitlines()[-1])["eval/failed"] == 5
    assert "error: example 0: " in output and "max_model_len" in output


def test_a_deadline_that_lets_nothing_finish_is_status_one(checkpoint, data, capsys):
    argv = [str(checkpoint), "--data", str(data), "--prompt", "{question}"]
    assert evaluate_checkpoint.run([*argv, "--reference", "{answer}", "--deadline", "1e-6"]) == 1
    output = capsys.readouterr()
    assert json.loads(output.out.splitlines()[-1])["eval/timed_out"] == 5
    assert (
        output.err.strip()
        == "evaluate_checkpoint: no example finished within 1e-06 s: raise --deadline"
    )
