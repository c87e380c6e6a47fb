"""Start runs of many processes at once: the libraries are loaded in one parent, which forks.

Everything else is real: processes, signals, gloo, files. The parent never trains; it packs a few
samples, so that what numba compiles is compiled once.
"""

from __future__ import annotations

import faulthandler
import os
import re
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from nopad.packing import PackedDataset


def compile_once() -> None:
    """Have numba compile, or load, what packing needs, for all forks to come."""
    list(PackedDataset([[1, 2, 3], [4, 5]] * 9, budget=8))


class Ranks:
    """The processes of one run; every rank calls `target(rank)` and exits with what it returns."""

    def __init__(self, target: Callable[[int], int | None], folder: Path, world: int = 1):
        self.folder, self.codes = folder, [None] * world
        folder.mkdir(parents=True, exist_ok=True)
        port = _free_port()
        self.pids = [self._fork(target, rank, world, port) for rank in range(world)]

    def _fork(self, target: Callable, rank: int, world: int, port: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            os.setpgid(0, 0)
            _settle(self.folder, rank, world, port)
            code = target(rank) or 0
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def send(self, number: int, rank: int) -> None:
        if self.codes[rank] is None:
            os.kill(self.pids[rank], number)

    def wait(self, seconds: float = 240) -> list[int]:
        """Return the exit codes, negative for signals; whoever is not done by then is killed."""
        until = time.monotonic() + seconds
        while None in self.codes:
            for rank, pid in enumerate(self.pids):
                if self.codes[rank] is None and (found := os.waitpid(pid, os.WNOHANG))[0]:
                    self.codes[rank] = os.waitstatus_to_exitcode(found[1])
            if time.monotonic() > until:
                for rank in range(len(self.pids)):
                    self.send(signal.SIGABRT, rank)  # faulthandler says where each thread is
                time.sleep(1)
                self.kill()
                said = "\n".join(self.said(rank)[-6000:] for rank in range(len(self.pids)))
                raise AssertionError(f"no end after {seconds} s: {self.codes}\n{said}")
            time.sleep(0.005)
        return self.codes

    def kill(self) -> None:
        """Kill what is left, with all children."""
        for rank, pid in enumerate(self.pids):
            if self.codes[rank] is None:
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                self.codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def said(self, rank: int = 0) -> str:
        path = self.folder / f"said-{rank}"
        said = path.read_text() if path.exists() else ""
        return re.sub(r"\nExtension modules: .*", "", said)  # where it stands is said above it

    def wait_for(self, what: Callable[[], bool], seconds: float = 120) -> None:
        until = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < until, self.said()
            time.sleep(0.002)


def fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _settle(folder: Path, rank: int, world: int, port: int) -> None:
    """Be the process a launcher would have started."""
    said = os.open(folder / f"said-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.chdir(folder)
    faulthandler.enable(all_threads=True)
    os.environ.update(ACCELERATE_USE_CPU="true", LOCAL_WORLD_SIZE=str(os.cpu_count()))
    if world > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
