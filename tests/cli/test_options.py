"""Options that commands share: folders are created, ~ is expanded, defaults are shown."""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
from typing import get_args

import pytest
from nopad.cli import generate, inspect_data
from nopad.cli.options import (
    as_cli_message,
    count,
    count_or_fraction,
    number_above_0,
    number_from_0,
    plot_path,
    writable_path,
)


def test_the_folders_of_a_new_file_are_there_before_any_work(tmp_path):
    path = tmp_path / "a" / "b" / "map.html"
    assert writable_path(str(path)) == path
    path.write_text("as any writer would")


def test_a_file_where_a_folder_should_be_is_told(tmp_path):
    (tmp_path / "taken").touch()
    for name in ("taken/map.html", "taken/deeper/map.html"):
        with pytest.raises(
            argparse.ArgumentTypeError, match="is not a folder and cannot be created"
        ):
            writable_path(str(tmp_path / name))


def test_a_new_file_may_lie_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert writable_path("~/maps/map.html") == tmp_path / "maps" / "map.html"
    with pytest.raises(argparse.ArgumentTypeError, match="~ is a folder"):
        writable_path("~")


def test_help_tells_defaults_of_zero_and_leaves_out_what_says_nothing():
    text = re.sub(r"\s+", " ", generate._parser().format_help())
    for default in ("greedy decoding (default: 0.0)", "from all (default: 0)",
                    "probability (default: 0.0)", "of SamplingParams (default: 0)"):  # fmt: skip
        assert default in text
    assert not re.search(r"default: (None|False|\[\]|==)", text)


def test_help_tells_of_every_command_and_of_the_version(capsys):
    from nopad.__main__ import COMMANDS, main

    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in (*COMMANDS, "--version"))


def test_errors_name_options_and_leave_paths_alone():
    message = as_cli_message('data/dtype=1/x.bin: glob="*.jsonl" finds nothing, say dtype="uint16"')
    assert message == "data/dtype=1/x.bin: --glob *.jsonl finds nothing, say --dtype uint16"


def test_the_list_of_commands_and_the_face_of_cli_need_no_torch():
    program = (
        "import sys, nopad.cli\nfrom nopad.__main__ import main\nmain(['--help'])\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'lm_eval')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and "doctor" in done.stdout, done.stderr


@pytest.mark.parametrize("name", ["", "/proc/map.html", "x" * 300, "/dev/full/map.html"])
def test_a_file_that_cannot_be_written_is_told_before_any_work(name):
    with pytest.raises(argparse.ArgumentTypeError, match=r"empty|not writable|too long|folder"):
        writable_path(name)


def test_a_trial_of_writing_leaves_files_as_they_were(tmp_path):
    (tmp_path / "old").write_text("kept")
    writable_path(str(tmp_path / "old"))
    writable_path(str(tmp_path / "new"))
    assert [(f.name, f.read_text()) for f in tmp_path.iterdir()] == [("old", "kept")]


@pytest.mark.parametrize(
    ("parse", "wrong", "right"),
    [
        (count_or_fraction, ["2.7", "nan", "0", "-1", "inf"], {"0.5": 0.5, "1": 1, "3.0": 3}),
        (count, ["-1", "1.5", "nan", "1e30"], {"0": 0, "1e3": 1000}),
        (number_from_0, ["-1", "nan", "inf", "x"], {"0": 0.0, "1e-3": 1e-3}),
        (number_above_0, ["-1", "0", "nan", "x"], {"2": 2.0, "inf": float("inf")}),
        (plot_path, ["plot.xyz", "plot"], {}),
    ],
)
def test_a_wrong_number_is_refused_and_a_right_one_is_not_changed(parse, wrong, right):
    for text in wrong:
        with pytest.raises(argparse.ArgumentTypeError):
            parse(text)
    assert [parse(text) for text in right] == list(right.values())


def test_an_option_without_effect_on_the_data_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"input_ids": [1, 2]}\n')
    for option, value in (("--glob", "*.jsonl"), ("--dtype", "uint16")):
        with pytest.raises(ValueError, match=f"^{option} "):
            inspect_data.main([str(tmp_path / "a.jsonl"), option, value])


@pytest.mark.parametrize("command", [["--help"], ["--version"], ["nonsense"], []])
def test_output_goes_anywhere(command, monkeypatch, capsys):
    """A closed pipe ends the command quietly; a closed standard output takes everything."""
    from nopad.__main__ import main

    class ClosedPipe(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", ClosedPipe())
    expected = 2 if command == ["nonsense"] else 141
    assert main(command) == expected
    monkeypatch.setattr(sys, "stdout", None)
    assert main(command) == (2 if command == ["nonsense"] else 0)
    sys.stdout.close()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert main(command) in (0, 2) and sys.stdout.encoding == "utf-8"
    assert "Traceback" not in capsys.readouterr().err


def test_layouts_and_overflows_are_those_of_the_api():
    from nopad.cli import options
    from nopad.packing.encoding import row_format
    from nopad.packing.planning import Overflow

    assert tuple(row_format.ROW_FORMATS) == options.ROW_FORMATS
    assert set(get_args(Overflow)) == set(options.OVERFLOWS)


def test_advice_that_is_python_is_not_given_on_the_command_line():
    message = "a turn is from 'x': pass a function as format=; check=False skips this check"
    assert as_cli_message(message).endswith("'x': convert the rows to text or messages first")
    message = "lower the budget to 16, or pass PackedDataset(max_length=16)"
    assert as_cli_message(message) == "lower the budget to 16, or pass --max-length 16"
