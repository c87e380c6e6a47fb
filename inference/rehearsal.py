"""Have the kernels of a call compiled before it is made: side by side, not one after the other.

Triton compiles a kernel when it is first launched, and the first steps of an engine launch dozens.
In a rehearsal the kernels that are not compiled yet are left out, and noted; when it ends, all of
them are compiled at once. What it computes is not worth looking at, so no kernel may read indices
that another one makes.

    with rehearsal():
        step()          # launches what is there, notes what is missing
    step()              # waits for no compiler
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import get_ident
from time import perf_counter
from typing import Any

import triton
from triton import knobs

log = logging.getLogger("nopad.inference")

_OURS = __name__.partition(".")[0]


@contextmanager
def rehearsal() -> Iterator[None]:
    """Leave out kernels of ours that this thread would have to compile; afterwards, they are."""
    missing: dict[Any, tuple[Any, str]] = {}
    thread, runtime = get_ident(), knobs.runtime
    before = runtime.jit_cache_hook

    def note(*args: Any, **launch: Any) -> bool | None:
        function = launch["fn"]
        if get_ident() != thread or not function.module.startswith(_OURS):
            return before(*args, **launch) if before is not None else None
        kernel = launch["compile"]
        missing[function.module, function.name, str(launch["key"])] = (
            function.jit_function,
            kernel["specialization_data"],
        )
        return True

    runtime.jit_cache_hook = note
    try:
        yield
    finally:
        runtime.jit_cache_hook = before
    _compile(list(missing.values()))


def _compile(missing: list[tuple[Any, str]]) -> None:
    if not missing:
        return
    began = perf_counter()
    threads = min(len(missing), len(os.sched_getaffinity(0)))
    # A kernel that cannot be compiled says so when it is launched.
    with ThreadPoolExecutor(threads) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        for function, specialization in missing:
            function.preload(specialization)
    log.info("compiled %d kernels in %.1f s", len(missing), perf_counter() - began)
