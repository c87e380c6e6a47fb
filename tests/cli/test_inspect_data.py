"""`nopad inspect` reports what packing does."""

from __future__ import annotations

import io
import json
import os

import numpy as np
import pytest
import warm_python
from nopad.__main__ import main
from nopad.cli import inspect_data, pack_map, printable
from nopad.cli.inspect_data import budget_table, pack_text, padding_waste
from nopad.packing import Pack, Sample


@pytest.fixture
def data(tmp_path):
    draw = np.random.default_rng(0)
    rows = [{"input_ids": draw.integers(1, 99, n).tolist()} for n in draw.integers(2, 60, 200)]
    path = tmp_path / "ids.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_file_of_tokens_is_shown_whole(data, tmp_path, capsys):
    page = tmp_path / "new" / "map.html"
    assert main(["inspect", str(data), "--budget", "128", "--packs", "3", "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "200 samples" in out and "max 59" in out
    assert "padded batches of 32" in out
    assert out.count(" samples\n") == 3
    assert "pack 0: " in out and "[[" in out
    assert page.read_text().count("<p>") == 3


def test_of_a_stream_whole_samples_are_measured_not_their_parts(tmp_path, monkeypatch, capsys):
    """Streams that are not pretokenized split long samples; the parts are not samples."""
    monkeypatch.setattr("nopad.packing.pipeline.SMALL_BYTES", 0)
    monkeypatch.setattr("nopad.cli.inspect_data.MAX_STREAM_PACKS", 1000)
    path = tmp_path / "long.jsonl"
    rows = [{"input_ids": [1] * (200 if i % 3 == 0 else 10)} for i in range(300)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["inspect", str(path), "--budget", "64"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("300 samples, 22,000 tokens; length: median 10, p99 200, max 200")
    monkeypatch.setattr("nopad.cli.inspect_data.MAX_STREAM_PACKS", 8)
    assert main(["inspect", str(path), "--budget", "64"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("the first 256 samples, ") and "max 200" in out
    waste = padding_waste(np.array([len(row["input_ids"]) for row in rows[:256]]))
    assert f"would be {waste:.1%} padding" in out


def test_of_many_samples_it_says_that_they_are_the_first(data, monkeypatch, capsys):
    monkeypatch.setattr("nopad.cli.inspect_data.MAX_LENGTHS", 150)
    assert main(["inspect", str(data), "--budget", "128"]) == 0
    assert capsys.readouterr().out.startswith("the first 150 of 200 samples, ")


def test_a_folder_of_several_kinds_is_told_with_the_option_that_chooses(data, capsys):
    (data.parent / "LICENSE").write_text("All rights reserved.")
    assert main(["inspect", str(data.parent)]) == 2
    assert capsys.readouterr().err.endswith("files: choose some with --glob\n")
    assert main(["inspect", str(data.parent), "--glob", "*.jsonl"]) == 0
    assert "200 samples" in capsys.readouterr().out


def test_flat_tokens_are_inspected(tmp_path, capsys):
    np.array([5, 6, 0, 7, 8, 9, 0], np.uint16).tofile(tmp_path / "flat.bin")
    assert main(["inspect", str(tmp_path / "flat.bin")]) == 2
    assert "need --dtype (uint16 or uint32) and --add-eos (an id)" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "flat.bin"), "--dtype", "uint16", "--add-eos", "0"]) == 0
    assert "2 samples, 7 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("small", [0, 1 << 20])
def test_a_bad_row_stops_it_or_is_left_out_and_counted(data, small, monkeypatch, capsys):
    monkeypatch.setattr("nopad.packing.pipeline.SMALL_BYTES", small)
    with data.open("a") as file:
        file.write('{"input_ids": []}\n')
    assert main(["inspect", str(data), "--budget", "128"]) == 2
    assert "ids.jsonl, line 201: " in (err := capsys.readouterr().err) and "--on-error skip" in err
    assert main(["inspect", str(data), "--budget", "128", "--on-error", "skip"]) == 0
    out = capsys.readouterr().out
    assert "200 samples" in out and "1 rows skipped; the first: ids.jsonl, line 201: " in out


def test_text_without_a_tokenizer_is_told_of_the_option(tmp_path, capsys):
    (tmp_path / "text.jsonl").write_text('{"text": "Once"}\n{"body": "Once"}\n')
    assert main(["inspect", str(tmp_path / "text.jsonl")]) == 2
    assert "pass --tokenizer (pass --on-error skip" in capsys.readouterr().err


def test_a_sample_too_long_is_told_with_what_the_option_takes(data, capsys):
    assert main(["inspect", str(data), "--budget", "8", "--overflow", "error"]) == 2
    assert "or choose --overflow (split, truncate or drop)" in capsys.readouterr().err


def test_an_end_that_is_no_token_is_told_of_the_option(checkpoint_dir, tmp_path, capsys):
    (tmp_path / "text.jsonl").write_text('{"text": "Once"}\n')
    given = [str(tmp_path / "text.jsonl"), "--tokenizer", str(checkpoint_dir)]
    assert main(["inspect", *given, "--add-eos", "999999"]) == 2
    err = capsys.readouterr().err
    assert "--add-eos 999999: the vocabulary has the ids from 0 " in err and "--on-error" not in err


def test_what_cannot_be_read_is_one_line_and_status_two(tmp_path, capsys):
    assert main(["inspect", str(tmp_path / "none.jsonl")]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_only_what_counts_stands_in_brackets():
    sample = Sample(np.array([5, 6, 7, 8]), np.array([-100, -100, 7, 8]))
    assert pack_text(Pack.of([sample], 8), None).endswith("4 tokens  5 6[[7 8]]")


def test_the_map_draws_every_token_once():
    row = pack_map.draw_pack([100, 28], budget=128, width=64, color=False)
    assert len(row) == 64 and row.count("█") == 50 and row.count("▓") == 14


def test_fill_and_waste_are_those_of_the_lengths():
    lengths = np.full(64, 32)
    assert padding_waste(lengths) == 0.0
    assert "100.00%" in budget_table(lengths, 128, "split")


@pytest.mark.parametrize(
    ("overflow", "per_pack"),
    [("drop", ["-", "1.0", "2.0", "2.0"]), ("split", ["1.0", "1.0", "1.5", "2.0"])],
)
def test_a_pack_is_said_to_hold_what_lies_in_it(overflow, per_pack):
    """Neither what was dropped, nor documents where their parts were packed."""
    rows = budget_table(np.array([10, 10, 30, 30]), 20, overflow).splitlines()[1:]
    assert [row.lstrip("*").split()[3] for row in rows] == per_pack


def test_the_picture_is_a_png(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    pack_map.write_png(tmp_path / "map.png", [np.array([3, 4])], 8)
    assert (tmp_path / "map.png").read_bytes()[:4] == b"\x89PNG"


def test_a_reader_that_has_read_enough_is_answered_as_by_sigpipe(data):
    command = ["-m", "nopad", "inspect", str(data), "--budget", "128"]
    reading, writing = os.pipe()
    os.close(reading)
    done = warm_python.run(command, stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


ESCAPES = "\x1b]52;c;aGk=\x07\x1b[2J\x9b31m\r\x08\u202e"
CONTROLS = set("\x1b\x07\x9b\r\x08\u202e")


def test_escape_sequences_of_the_data_are_shown_not_sent(tmp_path, capsys):
    class Tokenizer:
        def decode(self, ids):
            return f"Once{ESCAPES}"

    text = pack_text(Pack.of([Sample(np.array([5, 6]))], 8), Tokenizer())
    assert not CONTROLS & set(text) and r"Once\u001b]52;c;" in text
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"input_ids": [1, 2]}) + '\n{"\x9b": \x9b}\n')
    assert main(["inspect", str(path), "--on-error", "skip"]) == 0
    assert main(["inspect", str(path)]) == 2
    assert main(["inspect", str(tmp_path / f"none{ESCAPES}.jsonl")]) == 2
    said = "".join(capsys.readouterr())
    assert not CONTROLS & set(said) and r"none\u001b]52" in said


def test_printable_text_stays_as_it_is():
    text = "naïve 日本\t👩\u200d🚀\n"
    assert printable(text) == text and printable("a\x1bb") == r"a\u001bb"


def test_a_budget_beyond_memory_is_one_line(data, capsys):
    assert main(["inspect", str(data), "--budget", "1000000000000"]) == 2
    told = "nopad inspect: budget 1000000000000: a pack has at most 268435456 tokens\n"
    assert capsys.readouterr().err == told


def test_the_folder_one_stands_in_is_read(data, monkeypatch, capsys):
    monkeypatch.chdir(data.parent)
    assert main(["inspect", ".", "--budget", "128"]) == 0
    assert "200 samples" in capsys.readouterr().out


def test_an_image_has_the_name_it_was_given(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    pack_map.write_png(tmp_path / "map", [np.array([3, 4])], 8)
    assert [path.name for path in tmp_path.iterdir()] == ["map"]


def test_data_whose_rows_are_all_skipped_says_why(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"input_ids": "abc"}\n')
    with pytest.raises(ValueError, match=r"^every row was skipped; the first: .*got str"):
        inspect_data.main([str(tmp_path / "a.jsonl"), "--on-error", "skip"])
    with pytest.raises(ValueError, match="the name of the data is empty"):
        inspect_data.main([""])


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colors_can_be_switched_off(monkeypatch, name, value):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    assert pack_map.has_color(terminal)
    monkeypatch.setenv(name, value)
    assert not pack_map.has_color(terminal)
