"""Options that commands share: folders are created, ~ is expanded, defaults are shown."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys

import pytest
from nopad.cli import generate
from nopad.cli.options import as_cli_message, writable_path


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
                    "probability (default: 0.0)", "of the sampling (default: 0)"):  # fmt: skip
        assert default in text
    assert not re.search(r"default: (None|False|\[\]|==)", text)


def test_help_tells_of_every_command_and_of_the_version(capsys):
    from nopad.__main__ import COMMANDS, main

    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in (*COMMANDS, "--version"))


def test_errors_speak_of_options_also_where_values_are_patterns_and_not_inside_paths():
    message = as_cli_message('data/dtype=1/x.bin: glob="*.jsonl" finds nothing, say dtype="uint16"')
    assert message == "data/dtype=1/x.bin: --glob *.jsonl finds nothing, say --dtype uint16"


def test_the_list_of_commands_and_the_face_of_cli_need_no_torch():
    program = (
        "import sys, nopad.cli\nfrom nopad.__main__ import main\nmain(['--help'])\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'lm_eval')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and "doctor" in done.stdout, done.stderr
