"""`nopad generate` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from nopad.cli.generate import main


@pytest.fixture(scope="module")
def checkpoint() -> str:
    root = Path(os.environ.get("NOPAD_SHARED") or Path(__file__).parents[3] / "shared")
    folder = root / "models" / "stories260k"
    if not folder.is_dir():
        pytest.skip(reason=f"no model at {folder}; set NOPAD_SHARED")
    return str(folder)


def lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_prompts_of_the_command_line_come_back_completed(checkpoint, capsys):
    status = main(
        [checkpoint, "--prompt", "Once upon a time", "--prompt", "Lily", "--max-tokens", "9"]
    )
    done = lines(capsys.readouterr().out)
    assert status == 0 and [d["index"] for d in done] == [0, 1]
    assert done[0]["text"].startswith(", there was") and len(done[0]["tokens"]) == 9


def test_files_of_prompts_are_read_and_results_written(checkpoint, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "Once"}\n\n{"prompt": [1, 403, 407]}\n')
    out = tmp_path / "out.jsonl"
    given = ["--file", str(tmp_path / "in.jsonl"), "--output", str(out), "--max-tokens", "4"]
    trace = tmp_path / "trace.json"
    more = ["--n", "2", "--temperature", "0.9", "--logprobs", "1", "--trace", str(trace)]
    assert main([checkpoint, *given, *more]) == 0
    done = lines(out.read_text())
    assert [(d["index"], d["sibling"]) for d in done] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(len(d["logprobs"]) == len(d["tokens"]) for d in done)
    assert json.loads(trace.read_text())["traceEvents"]


def test_a_failed_request_gives_status_1_and_the_others_their_text(checkpoint, capsys):
    status = main([checkpoint, "--prompt", "a" * 9000, "--prompt", "Once", "--max-tokens", "3"])
    done = lines(capsys.readouterr().out)
    assert status == 1 and "max_length" in done[0]["error"] and done[1]["text"]


def test_mistakes_are_said_in_one_line(checkpoint, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n')
    for wrong in (
        [checkpoint],
        [checkpoint, "--file", str(tmp_path / "bad.jsonl")],
        [str(tmp_path), "--prompt", "a"],
        [checkpoint, "--prompt", "a", "--temperature", "-1"],
    ):
        with pytest.raises(ValueError, match=r"\w") as caught:
            main(wrong)
        assert "\n" not in str(caught.value)


def test_the_command_runs_as_a_process(checkpoint):
    command = [sys.executable, "-m", "nopad", "generate", checkpoint, "--prompt", "Once"]
    run = subprocess.run(
        [*command, "--max-tokens", "3", "--stats"], capture_output=True, text=True, cwd=Path.home()
    )
    assert run.returncode == 0 and len(lines(run.stdout)) == 1
    assert '"new_tokens": 3' in run.stderr
