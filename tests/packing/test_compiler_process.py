"""The packer is compiled by one process for all that need it, or by each where that fails."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Timer
from typing import Any

import numba
import pytest
from nopad.packing import PackedDataset, compiler_process
from nopad.packing.compiler_process import start_compiler
from nopad.packing.numba_jit import LOCK, cache_folder, is_being_compiled, jit
from nopad.packing.preparation_progress import announce_compilation

SLOW = "import os, time\ndef main():\n    while not os.path.exists({path!r}): time.sleep(0.01)\n"


def add_one(x):
    return x + 1


class Packer:
    """A function that is not compiled, and a process that compiles it until `finish`."""

    def __init__(self, folder: Path):
        self.function: Any = jit(add_one)
        self._done = folder / "done"
        (folder / "slow_compiler.py").write_text(SLOW.format(path=str(self._done)))

    def finish(self) -> None:
        self._done.touch()

    def started(self) -> list[subprocess.Popen]:
        return compiler_process._started


@pytest.fixture
def packer(monkeypatch, tmp_path) -> Iterator[Packer]:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    packer = Packer(tmp_path)
    monkeypatch.setattr(compiler_process, "fit_window", packer.function)
    monkeypatch.setattr(compiler_process, "__name__", "slow_compiler")
    monkeypatch.setattr(compiler_process, "_started", [])
    yield packer
    packer.finish()
    for process in packer.started():
        process.wait(30)


def test_ranks_and_workers_start_one_process(packer):
    start_compiler()
    (process,) = packer.started()
    start_compiler()
    assert packer.started() == [process] and is_being_compiled(packer.function)
    rank = multiprocessing.get_context("fork").Process(target=_start_another)
    rank.start()
    rank.join(30)
    assert rank.exitcode == 0
    packer.finish()
    assert process.wait(30) == 0 and not is_being_compiled(packer.function)


def _start_another() -> None:
    compiler_process._started = []
    start_compiler()
    assert compiler_process._started == []


def test_the_planner_waits_for_the_process_and_says_so_once(packer, capsys):
    start_compiler()
    Timer(0.3, packer.finish).start()
    with announce_compilation(packer.function, "the packer"):
        assert not is_being_compiled(packer.function)
        assert packer.function(1) == 2  # not in the cache: the process compiled nothing
    said = capsys.readouterr().err
    assert said.count("compiling the packer (about 10 s, at the first start only; kept in") == 1


@pytest.mark.parametrize("strategy, starts", [("best_fit", 1), ("sequential", 0)])
def test_a_dataset_starts_the_process_its_strategy_needs(packer, strategy, starts):
    PackedDataset([[1, 2]], budget=4, strategy=strategy)
    assert len(packer.started()) == starts


def test_a_killed_process_is_not_waited_for(packer):
    start_compiler()
    (process,) = packer.started()
    process.kill()
    process.wait(30)
    assert not is_being_compiled(packer.function)
    start_compiler()
    assert len(packer.started()) == 1 and packer.started() != [process]


def test_no_process_is_started_for_what_is_compiled_or_cached(packer, monkeypatch):
    packer.function(1)
    start_compiler()
    monkeypatch.setattr(compiler_process, "fit_window", jit(add_one))  # as in a later start
    start_compiler()
    assert packer.started() == []
    for index in cache_folder(packer.function).glob("*.nbi"):
        os.utime(index, (0, 0))  # older than the source
    start_compiler()
    assert len(packer.started()) == 1


@pytest.mark.parametrize("lacks", ["cache", "lock", "python", "numba"])
def test_without_a_process_the_planner_compiles(packer, monkeypatch, lacks):
    if lacks == "cache":
        monkeypatch.setattr(compiler_process, "fit_window", numba.njit(add_one))
    elif lacks == "lock":
        (cache_folder(packer.function) / LOCK).mkdir()
    elif lacks == "python":
        monkeypatch.setattr(sys, "executable", "/no/such/python")
    else:
        monkeypatch.setattr(compiler_process, "fit_window", add_one)  # NUMBA_DISABLE_JIT
    start_compiler()
    assert packer.started() == [] and not is_being_compiled(compiler_process.fit_window)
    with announce_compilation(compiler_process.fit_window, "the packer"):
        assert compiler_process.fit_window(1) == 2


def test_the_process_ends_with_the_one_that_started_it(tmp_path):
    starts = (
        "import os, signal, sys, time\n"
        "from nopad.packing import compiler_process as c\n"
        "c.start_compiler()\n"
        "print(c._started[0].pid, flush=True)\n"
        "sys.stdin.read()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", starts]
    run = subprocess.run(command, env=environment, input=b"", stdout=subprocess.PIPE, timeout=60)
    assert run.returncode == -signal.SIGKILL
    pid, deadline = int(run.stdout), time.monotonic() + 30
    while _is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_running(pid)


def _is_running(pid: int) -> bool:
    """Whether a process runs; one that ended may still be listed."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_process_compiles_what_packs_are_planned_and_read_with():
    """It calls the compiled functions with the types that a dataset calls them with."""
    script = (
        "from nopad.packing import PackedDataset, compiler_process as c\n"
        "from nopad.packing.ordering import permutation\n"
        "from nopad.packing.sources import token_store\n"
        "c._end_with_parent = lambda: None\n"
        "c.main()\n"
        "functions = (c.fit_window, permutation._feistel, token_store._allocate_rows,\n"
        "             token_store._copy)\n"
        "before = [list(f.signatures) for f in functions]\n"
        "assert all(before)\n"
        "list(PackedDataset([[1, 2, 3], [4, 5]], budget=8))\n"
        "assert before == [list(f.signatures) for f in functions]\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
