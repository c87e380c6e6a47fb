"""`nopad tokenize`: tokens in a folder, which `nopad inspect` describes and verifies."""

from __future__ import annotations

import json

import pytest
from char_words import char_tokenizer
from nopad.__main__ import main


@pytest.fixture
def saved(tmp_path):
    """A tokenizer and a file of rows, by name."""
    char_tokenizer("abc").save_pretrained(tmp_path / "tokenizer")
    rows = [{"text": "abc"[: n % 3 + 1] * 5} for n in range(30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "tokenizer"), str(tmp_path / "rows.jsonl"), str(tmp_path / "tokens")


def test_tokens_are_written_inspected_and_verified(saved, tmp_path, capsys):
    tokenizer, rows, out = saved
    assert main(["tokenize", rows, "--tokenizer", tokenizer, "--out", out]) == 0
    assert "30 documents, 330 tokens in 1 shard:" in capsys.readouterr().out
    assert main(["inspect", out, "--budget", "64", "--verify"]) == 0
    shown = capsys.readouterr().out
    assert "330 tokens of rows.jsonl in 1 shards of uint16, vocabulary 5, eos 0" in shown
    assert "all files match their checksums" in shown
    tokens = tmp_path / "tokens" / "00000.bin"
    tokens.write_bytes(b"\0\1" + tokens.read_bytes()[2:])
    assert main(["inspect", out, "--budget", "64", "--verify"]) == 2
    assert "00000.bin differs from its checksum: delete it" in capsys.readouterr().err
    assert main(["inspect", rows, "--tokenizer", tokenizer, "--verify"]) == 2
    assert "is not a folder that `nopad tokenize` wrote" in capsys.readouterr().err


def test_parts_are_completed_by_the_same_command(saved, capsys):
    tokenizer, rows, out = saved
    command = ["tokenize", rows, "--tokenizer", tokenizer, "--out", out]
    assert main([*command, "--part", "0/2"]) == 0
    assert "part 0 of 2 is in" in capsys.readouterr().out
    assert main(["inspect", out]) == 2
    assert "are not complete: run the same `nopad tokenize` again" in capsys.readouterr().err
    assert main(command) == 0
    with pytest.raises(SystemExit):
        main([*command, "--part", "2/2"])


def test_a_fault_is_one_line_with_the_option(saved, capsys):
    _, rows, out = saved
    assert main(["tokenize", rows, "--out", out]) == 2
    assert "a row of text needs a tokenizer: pass --tokenizer" in capsys.readouterr().err


def test_a_place_that_is_no_folder_is_refused(saved, tmp_path, capsys, monkeypatch):
    tokenizer, rows, _ = saved
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for out, message in (("", "the name of the folder to write to is empty"), (rows, "is a file")):
        assert main(["tokenize", rows, "--tokenizer", tokenizer, "--out", out]) == 2
        assert message in capsys.readouterr().err
    assert not list((tmp_path / "here").iterdir())


def test_skipped_rows_are_counted_with_the_option_that_helps(saved, tmp_path, capsys):
    tokenizer, rows, out = saved
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"question": "a", "answer": "b"}\n')
    command = ["tokenize", rows, "--tokenizer", tokenizer, "--out", out, "--on-error", "skip"]
    assert main(command) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "1 rows skipped; the first: rows.jsonl, line 31: " in shown
    assert "--text-column" in shown and "text_column=" not in shown


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ("", [], "rows.jsonl: the data is empty"),
        ('{"text": ""}', ["--on-error", "skip"], "every row was skipped; the first: rows.jsonl"),
    ],
)
def test_data_without_a_document_is_refused(saved, tmp_path, capsys, row, options, message):
    tokenizer, rows, out = saved
    (tmp_path / "rows.jsonl").write_text(row)
    assert main(["tokenize", rows, "--tokenizer", tokenizer, "--out", out, *options]) == 2
    assert message in capsys.readouterr().err
