"""The folder of a run: what a kill has torn in it does not stand in the way of a resume."""

from __future__ import annotations

import json

from run_folder import RunFolder


def test_a_log_line_torn_by_a_kill_is_dropped_with_the_steps_to_be_taken_again(tmp_path):
    folder = RunFolder(tmp_path, {})
    for step in (1, 2, 3):
        folder.log(step, {"loss": step / 2})
    whole = (tmp_path / "log.jsonl").read_text().splitlines(keepends=True)
    for torn in ('{"step": 4, "lo', '{"step"', "\x00\x00\x00", "4", "{}"):
        (tmp_path / "log.jsonl").write_text("".join(whole) + torn)
        folder.forget_after(2)
        assert (tmp_path / "log.jsonl").read_text() == "".join(whole[:2])
        folder.log(3, {"loss": 0.5})
        assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 3


def test_what_a_run_was_started_with_is_written_once_and_at_once(tmp_path):
    RunFolder(tmp_path, {"seed": 7}).start()
    RunFolder(tmp_path, {"seed": 8}).start()
    assert json.loads((tmp_path / "run.json").read_text()) == {"seed": 7}
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
