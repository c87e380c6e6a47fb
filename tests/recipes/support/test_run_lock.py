"""Of two processes that train in one folder, the second is refused; a dead one does not block."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys

import pytest
from nopad.recipes.support.run_dir import RunDir
from nopad.recipes.support.run_lock import RANK_VARIABLES, is_main_process, lock_run

HOLDER = """
import os, sys, time
from pathlib import Path
from nopad.recipes.support.run_lock import lock_run
lock = lock_run(Path(sys.argv[1]))
if not os.fork():  # as a data worker
    print("locked", flush=True)
    time.sleep(300)
time.sleep(300)
"""


@pytest.fixture
def holder(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout.readline() == "locked\n"
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def resumed(folder) -> RunDir:
    args = argparse.Namespace(output=folder, resume="last", config=None)
    return RunDir.from_args("pretrain", args)


def test_a_run_that_is_being_trained_is_not_resumed(holder, tmp_path):
    (tmp_path / "run.json").write_text("{}")
    message = f"{tmp_path} is being trained by process {holder.pid} on .*: wait until it ends"
    with pytest.raises(ValueError, match=message):
        resumed(tmp_path)
    with pytest.raises(ValueError, match=message):
        RunDir(tmp_path, {}).create()


def test_other_ranks_of_the_run_do_not_lock(holder, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    resumed(tmp_path)


def test_a_dead_process_does_not_block_though_its_workers_live(holder, tmp_path):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    lock_run(tmp_path).close()


@pytest.mark.parametrize("name", RANK_VARIABLES)
def test_the_main_process_is_the_one_with_rank_zero(name, monkeypatch):
    for other in RANK_VARIABLES:
        monkeypatch.delenv(other, raising=False)
    assert is_main_process()
    monkeypatch.setenv(name, "0")
    assert is_main_process()
    monkeypatch.setenv(name, "2")
    assert not is_main_process()
