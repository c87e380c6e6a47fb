"""Have the kernels of a call compiled before it is made: side by side, not one after the other.

Triton compiles a kernel when it is first launched, and the first steps of an engine launch dozens.
In a rehearsal the kernels that are not compiled yet are left out, and noted; when it ends, all of
them are compiled at once. What it computes is not worth looking at, so no kernel may read indices
that another one makes.

    with rehearsal(device):
        step()          # launches what is there, notes what is missing
    step()              # waits for no compiler
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from threading import get_ident
from time import perf_counter
from typing import Any

import torch
import triton
from triton import knobs

from ...attention.backends import CallSpec, selection

log = logging.getLogger("nopad.inference")

_OURS = __name__.partition(".")[0]


@contextmanager
def precompile_kernels(device: torch.device) -> Iterator[None]:
    """Leave out kernels of ours that this thread would have to compile; afterwards, they are.

    Attention is taken from the backend that leads; which one really serves is found out later.
    """
    missing: dict[Any, tuple[Any, str]] = {}
    thread, before, select = get_ident(), knobs.runtime.jit_cache_hook, selection.select

    def note(*args: Any, **launch: Any) -> bool | None:
        function, kernel = launch["fn"], launch["compile"]
        if get_ident() != thread or not function.module.startswith(_OURS):
            return before(*args, **launch) if before is not None else None
        name = function.module, function.name, str(launch["key"])
        missing[name] = function.jit_function, kernel["specialization_data"]
        return True

    def leading(facts: tuple, forced: str | None = None) -> str:
        return (_leading if get_ident() == thread else select)(facts, forced)

    with ExitStack() as stack:
        stack.callback(setattr, knobs.runtime, "jit_cache_hook", before)
        knobs.runtime.jit_cache_hook = note
        stack.callback(setattr, selection, "choose", select)
        selection.select = leading
        yield
    _compile(list(missing.values()), device)


def _leading(facts: tuple, forced: str | None) -> str:
    """The first backend whose declared limits allow a call: a trial here would prove nothing."""
    ask = CallSpec(*facts)
    kind = "paged" if ask.paged else "packed"
    able = (n for n in selection.order(ask) if hasattr(selection.module(n), kind))
    free = (n for n in able if selection.module(n).why_not(ask) is None)
    return forced or (selection.forced_paged_backend() if ask.paged else None) or next(free)


def _compile(missing: list[tuple[Any, str]], device: torch.device) -> None:
    """Compile kernels and make them ready to launch, as many at once as there are processors."""
    began = perf_counter()
    # A kernel that cannot be compiled says so when it is launched.
    with _Compilers(device) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        for function, specialization in missing:
            function.preload(specialization)
    if missing:
        log.info("compiled %d kernels in %.1f s", len(missing), perf_counter() - began)


class _Compilers(ThreadPoolExecutor):
    """Threads that compile a kernel and load it, launcher and all."""

    def __init__(self, device: torch.device):
        threads = len(os.sched_getaffinity(0))
        super().__init__(threads, initializer=torch.cuda.set_device, initargs=(device,))

    def submit(self, fn: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        def compile_and_load() -> Any:
            kernel = fn(*args, **options)
            assert kernel.run is not None  # asking for it loads the kernel
            return kernel

        return super().submit(compile_and_load)
