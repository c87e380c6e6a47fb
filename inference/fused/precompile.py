"""Find the Triton kernels that a call would have to compile, and compile them first, in parallel.

Triton compiles a kernel when it is first launched, and the first steps of an engine launch dozens.
Inside `record_missing` launches of kernels that are not compiled yet are skipped and recorded.
Results inside are meaningless, so no kernel may read indices that another kernel computes.

    with record_missing() as missing:
        step()          # launches the compiled kernels, records the missing ones
    with compile_in_background(missing, device):
        step()          # waits for the kernels that it launches; on exit all are compiled
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Thread, get_ident
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

MissingKernel = tuple[Any, str]
"""A kernel's function and, as JSON, what it is specialized for."""


@contextmanager
def record_missing() -> Iterator[list[MissingKernel]]:
    """Skip launches of our kernels that this thread would have to compile, and collect them.

    Attention uses the preferred backend without a trial, which would prove nothing here: its
    kernels may be skipped too.
    """
    missing: list[MissingKernel] = []
    names: set[Any] = set()
    thread, previous_hook = get_ident(), knobs.runtime.jit_cache_hook

    def record(*args: Any, **launch: Any) -> bool | None:
        function, kernel = launch["fn"], launch["compile"]
        if get_ident() != thread or not function.module.startswith(_PACKAGE):
            return previous_hook(*args, **launch) if previous_hook is not None else None
        name = function.module, function.name, str(launch["key"])
        if name not in names:
            names.add(name)
            missing.append((function.jit_function, kernel["specialization_data"]))
        return True

    hashing = Thread(target=_hash_compiler, daemon=True)
    hashing.start()
    knobs.runtime.jit_cache_hook = record
    try:
        with without_trials():
            yield missing
    finally:
        knobs.runtime.jit_cache_hook = previous_hook
        hashing.join()


def _hash_compiler() -> None:
    """Hash the files of the compiler, which Triton does once, before it looks for a kernel on disk.

    It takes half a second, outside of Python's lock.
    """
    with suppress(Exception):  # then the first kernel waits for it
        from triton.runtime.cache import triton_key

        triton_key()


@contextmanager
def compile_in_background(missing: list[MissingKernel], device: torch.device) -> Iterator[None]:
    """Compile kernels and load them, as many at once as there are processors, the longest first.

    A launch inside waits for its own kernel only; leaving the block waits for all.
    """
    start = perf_counter()
    with (
        tqdm(
            total=len(missing),
            desc="nopad: compiling kernels",
            leave=False,
            disable=rank() > 0 or not missing or None,  # None: only in a terminal
        ) as bar,
        _binaries_only(),
        _CompilePool(device, bar) as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True),
    ):
        by_length = sorted(missing, key=lambda kernel: len(kernel[0].src), reverse=True)
        for function, specialization in by_length:
            with suppress(Exception):  # it raises when the kernel is launched
                function.preload(specialization)
        yield
    if missing:
        log.info("%d kernels compiled after %.1f s", len(missing), perf_counter() - start)


@contextmanager
def _binaries_only() -> Iterator[None]:
    """Cache kernels without the text of each stage, which Triton prints under Python's lock."""
    with knobs.compilation.scope():
        knobs.compilation.store_binary_only = True
        yield


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
