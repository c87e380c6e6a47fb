"""Of two processes that train in one folder, the second is refused; a dead one does not block."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest
import warm_python
from nopad.trainer import lock_folder

HOLDER = """
import os, sys, time
os.setsid()
from pathlib import Path
from nopad.trainer import lock_folder
lock = lock_folder(Path(sys.argv[1]))
if not os.fork():  # as a data worker
    print("locked", flush=True)
    time.sleep(300)
time.sleep(300)
"""


@pytest.fixture
def holder(tmp_path):
    process = warm_python.Popen(["-c", HOLDER, tmp_path], stdout=subprocess.PIPE)
    assert process.stdout.readline() == "locked\n"
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def test_a_folder_has_one_owner_and_a_dead_one_does_not_block(holder, tmp_path):
    with pytest.raises(ValueError, match=f"is being trained by process {holder.pid} on .*: wait"):
        lock_folder(tmp_path)
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()  # its worker lives
    lock_folder(tmp_path).close()
