"""Flag that a forward is captured in a CUDA graph, and run its branches on parallel streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_capturing: ContextVar[bool] = ContextVar("nopad_capturing", default=False)


@contextmanager
def capture_mode(enabled: bool = True) -> Iterator[None]:
    """Run forwards in the same mode as during CUDA graph capture."""
    token = _capturing.set(enabled)
    try:
        yield
    finally:
        _capturing.reset(token)


def is_capturing() -> bool:
    """Return whether the caller is inside `capture_mode`."""
    return _capturing.get()


def run_on_streams(x: Tensor, *branches: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Run branches of the same input: on parallel streams in a graph, one by one otherwise.

    Each fork waits for all earlier work and the join waits for all forks, so memory that one
    branch frees is never written while another stream still reads it.
    """
    if not is_capturing() or not x.is_cuda:
        return [branch(x) for branch in branches]
    main = torch.cuda.current_stream()
    sides = capture_streams(x.device)[1 : len(branches)]
    results: list[Any] = [None] * len(branches)
    with _join_on_exit(main) as forks:
        for index, side in enumerate(sides, start=1):
            side.wait_stream(main)
            forks.append(side)
            with torch.cuda.stream(side):
                results[index] = branches[index](x)
        results[0] = branches[0](x)
    return results


@contextmanager
def _join_on_exit(main: torch.cuda.Stream) -> Iterator[list[torch.cuda.Stream]]:
    """Let `main` wait for the streams appended to the list; others are not part of the capture.

    A failing branch is joined too: a capture cannot end while a fork is open.
    """
    forks: list[torch.cuda.Stream] = []
    try:
        yield forks
    except BaseException:
        with suppress(RuntimeError):  # report the original error, not the broken capture
            for side in forks:
                main.wait_stream(side)
        raise
    for side in forks:
        main.wait_stream(side)


@lru_cache(maxsize=8)
def capture_streams(device: torch.device) -> list[torch.cuda.Stream]:
    """Return the device's capture stream and two side streams, always the same three.

    Libraries such as cuBLAS keep a workspace for every stream they have seen.
    """
    return [torch.cuda.Stream(device) for _ in range(3)]
