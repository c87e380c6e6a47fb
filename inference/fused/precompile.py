"""Compile the Triton kernels of a call before it is made, in parallel.

Triton compiles a kernel when it is first launched, and the first steps of an engine launch dozens.
Inside `precompile_kernels`, launches of kernels that are not compiled yet are skipped and recorded;
on exit all of them are compiled at once. Results inside are meaningless, so no kernel may read
indices that another kernel computes.

    with precompile_kernels(device):
        step()          # launches the compiled kernels, records the missing ones
    step()              # waits for no compiler
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import get_ident
from time import perf_counter
from typing import Any

import torch
import triton
from tqdm import tqdm
from triton import knobs

from ...attention.backends import without_trials
from ...runtime import rank

log = logging.getLogger("nopad.inference")

_PACKAGE = __name__.partition(".")[0]


@contextmanager
def precompile_kernels(device: torch.device) -> Iterator[None]:
    """Skip launches of our kernels that this thread would have to compile; compile them on exit.

    Attention uses the preferred backend without a trial, which would prove nothing here: its
    kernels may be skipped too.
    """
    missing: dict[Any, tuple[Any, str]] = {}
    thread, previous_hook = get_ident(), knobs.runtime.jit_cache_hook

    def record_missing(*args: Any, **launch: Any) -> bool | None:
        function, kernel = launch["fn"], launch["compile"]
        if get_ident() != thread or not function.module.startswith(_PACKAGE):
            return previous_hook(*args, **launch) if previous_hook is not None else None
        name = function.module, function.name, str(launch["key"])
        missing[name] = function.jit_function, kernel["specialization_data"]
        return True

    knobs.runtime.jit_cache_hook = record_missing
    try:
        with without_trials():
            yield
    finally:
        knobs.runtime.jit_cache_hook = previous_hook
    _compile(list(missing.values()), device)


def _compile(missing: list[tuple[Any, str]], device: torch.device) -> None:
    """Compile kernels and load them, as many at once as there are processors."""
    start = perf_counter()
    # A kernel that cannot be compiled raises when it is launched.
    with (
        tqdm(
            total=len(missing),
            desc="nopad: compiling kernels",
            leave=False,
            disable=rank() > 0 or not missing or None,  # None: only in a terminal
        ) as bar,
        _CompilePool(device, bar) as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True),
    ):
        for function, specialization in missing:
            function.preload(specialization)
    if missing:
        log.info("compiled %d kernels in %.1f s", len(missing), perf_counter() - start)


class _CompilePool(ThreadPoolExecutor):
    """Threads that compile a kernel and load it with its launcher."""

    def __init__(self, device: torch.device, bar: tqdm):
        threads = len(os.sched_getaffinity(0))
        self._bar = bar
        super().__init__(threads, initializer=torch.cuda.set_device, initargs=(device,))

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        def compile_and_load() -> Any:
            kernel = fn(*args, **kwargs)
            assert kernel.run is not None  # reading it loads the kernel
            self._bar.update()
            return kernel

        return super().submit(compile_and_load)
