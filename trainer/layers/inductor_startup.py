"""Load torch's compiler while a run is prepared; otherwise its first graph waits for it.

    layers are prepared  ─▶  start_inductor      starts processes that compile kernels, and imports
    first compiled call  ─▶  wait_for_inductor   traces a graph, whose kernels compile in parallel

By default, inductor starts these processes with the first graph, and they are ready seconds later:
until then, this process compiles the kernels, one after the other.
"""

from __future__ import annotations

import os
from threading import Thread

from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

_started: list[Thread] = []


def start_inductor(device: int) -> None:
    """Start to load inductor, once per process.

    device: index of the GPU.
    """
    if _started:
        return
    # Inductor sets this only if it compiles a kernel in this process: another run would look for
    # the kernels of the loss elsewhere, and compile them again.
    os.environ["TRITON_CACHE_DIR"] = triton_cache_dir(device)
    _started.append(Thread(target=_load, name="nopad inductor"))
    _started[0].start()


def wait_for_inductor() -> None:
    """Wait until what was started is loaded: two threads that import inductor could deadlock."""
    for thread in _started:
        thread.join()


def _load() -> None:
    from torch._inductor.async_compile import maybe_warm_pool
    from torch._inductor.runtime.triton_compat import HAS_TRITON, triton_key

    maybe_warm_pool()
    if HAS_TRITON:  # a hash of Triton's files, part of the keys of all caches, which torch keeps
        Thread(target=triton_key, name="nopad triton key").start()
    import torch._inductor.compile_fx  # noqa: F401
