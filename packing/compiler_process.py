"""Compile the packer in a process of its own, while this one tokenizes or compiles layers.

    PackedDataset    start_compiler     starts it, unless numba's cache has the packer
    Planner          waits until it ends, and loads the packer from the cache

It takes several seconds, once per installation. Ranks and workers that share a cache start one
process. If it cannot start, or is killed, the planner compiles the packer itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
from threading import Thread

import numpy as np

from .numba_jit import cache_folder, cache_lock, is_cached
from .ordering.permutation import permute, shuffle_key
from .planning.best_fit import fit_window, fit_windows
from .planning.planner import Plan
from .sample import Sample
from .sources.token_store import TokenArray, TokenStore

_started: list[subprocess.Popen] = []
"""The process, while it may run. It ends when this one does, which closes the pipe to it."""


def start_compiler() -> None:
    """Start the process, unless the packer is compiled or another process compiles it."""
    _started[:] = [process for process in _started if process.poll() is None]
    folder = cache_folder(fit_window)
    if folder is None or fit_window.signatures or not sys.executable:
        return
    # -P and this path: the same modules as here, and none of the current folder.
    command = [sys.executable, "-P", "-c", f"from {__name__} import main; main()"]
    path = os.pathsep.join(map(str, sys.path))
    try:
        if is_cached(fit_window, folder):
            return
        with cache_lock(folder) as lock:
            process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": path},
                pass_fds=[lock],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
    except OSError:
        return
    _started.append(process)


def main() -> None:
    """Compile what planning and reading packs need, the packer last."""
    Thread(target=_end_with_parent, daemon=True).start()
    store = TokenStore([TokenArray.of([Sample(np.arange(2))])])
    plan = Plan(*map(np.array, ([0], [0], [2], [0, 1])))
    permute(np.arange(2), 2, shuffle_key(0))
    store.gather(plan, np.arange(1))
    fit_windows(np.array([2]), np.arange(0), 0, 2, 1, False, True)


def _end_with_parent() -> None:
    os.read(0, 1)  # not sys.stdin: its lock would be held at exit
    os._exit(1)
