"""A data worker that dies is named at once, with what came last; nothing of it is left over."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import tiny_run
import warm_python
from nopad.trainer.data import PackedLoader
from nopad.trainer.data.worker_watch import WorkerWatch

SUPPORT = Path(__file__).parents[1] / "support"

CHILD = """
import sys, time
sys.path.insert(0, sys.argv[1])
import tiny_run
import torch.utils.data._utils.worker as worker
worker.MP_STATUS_CHECK_INTERVAL = 0.5  # seconds, 5 by default
from nopad.trainer import PackedLoader
for number, batch in enumerate(PackedLoader(tiny_run.dataset(epochs=None), num_workers=2)):
    if number == 3:
        print("reading", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def start(pause: float = 0.01) -> tuple[warm_python.Popen, list[psutil.Process]]:
    """Train on two workers' packs, at `pause` seconds a step."""
    command, pipe = ["-c", CHILD, SUPPORT, str(pause)], subprocess.PIPE
    child = warm_python.Popen(command, stdout=pipe, stderr=pipe)
    assert child.stdout.readline() == "reading\n"
    return child, psutil.Process(child.pid).children(recursive=True)


CASES = {"main": 0.01, "a worker, main waits": 0.0, "a worker, main computes": 0.3}
"""Who is killed, and how long a step of the training takes."""


@pytest.mark.parametrize("who", CASES)
def test_whoever_dies_it_is_told_and_nothing_is_left(who):
    before = shared_memory()
    child, workers = start(CASES[who])
    victim = child if who == "main" else workers[1]
    victim.kill()
    began = time.monotonic()
    said = child.communicate(timeout=300)[1]
    assert child.returncode == (-9 if who == "main" else 1) and time.monotonic() - began < 60
    if who != "main":
        pattern = rf"RuntimeError: data worker died: .*pid {workers[1].pid}, exit code -9.*"
        pattern += r"was pack \d+ \(up to sample \d+ of source 0\)"
        assert re.search(pattern, said.splitlines()[-1]), said
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert len(workers) == 2 and not alive
    assert [name for name in shared_memory() if name not in before] == []


def test_a_death_that_torch_caught_is_told_in_our_words():
    dead = SimpleNamespace(exitcode=-9, name="worker 0", pid=7)
    with WorkerWatch([dead], lambda: "pack 3") as watch:
        watch._raise_if_dead = lambda within=0.0: None  # not yet seen
        with pytest.raises(RuntimeError, match=r"pid 7, exit code -9.*pack 3"), watch.reading():
            del watch._raise_if_dead
            try:
                watch._on_sigchld(signal.SIGCHLD, None)  # it comes while torch waits for data
            except RuntimeError as error:
                raise RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly") from error


def shared_memory() -> list[str]:
    files = Path("/dev/shm").glob("torch_*")
    return sorted(path.name for path in files if path.stat().st_uid == os.getuid())


def test_a_bad_document_in_a_worker_keeps_its_own_error():
    rows = [[1, 2], [3, float("nan")]]
    data = tiny_run.PackedDataset(lambda: iter(rows), budget=8, shards=1, pretokenize=False)
    with pytest.raises(ValueError, match="row 1: input_ids must be integers, got float64"):
        list(PackedLoader(data, num_workers=1))
