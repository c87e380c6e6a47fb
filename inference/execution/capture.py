"""Whether a step is being captured into a graph, and what is worth doing only there."""

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
def capture_mode(really: bool = True) -> Iterator[None]:
    """Compute steps as they are to be captured."""
    token = _capturing.set(really)
    try:
        yield
    finally:
        _capturing.reset(token)


def is_capturing() -> bool:
    """Whether this is inside `capture_mode`."""
    return _capturing.get()


def run_on_streams(x: Tensor, *branches: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Run branches of the same input at the same time in a graph, else one by one.

    Each fork waits for all work before it and the join waits for all forks, so memory that one
    branch gives back is never written while another stream still reads it.
    """
    if not is_capturing() or not x.is_cuda:
        return [branch(x) for branch in branches]
    main = torch.cuda.current_stream()
    sides = streams(x.device)[1 : len(branches)]
    results: list[Any] = [None] * len(branches)
    with _joined(main) as forks:
        for place, side in enumerate(sides, start=1):
            side.wait_stream(main)
            forks.append(side)
            with torch.cuda.stream(side):
                results[place] = branches[place](x)
        results[0] = branches[0](x)
    return results


@contextmanager
def _joined(main: torch.cuda.Stream) -> Iterator[list[torch.cuda.Stream]]:
    """Wait for the forks noted inside, and for no other: it would be no part of the capture.

    Where a branch fails, too: a capture cannot be ended with a fork open.
    """
    forks: list[torch.cuda.Stream] = []
    try:
        yield forks
    except BaseException:
        with suppress(RuntimeError):  # the reason is told, not the broken capture
            for side in forks:
                main.wait_stream(side)
        raise
    for side in forks:
        main.wait_stream(side)


@lru_cache(maxsize=8)
def streams(device: torch.device) -> list[torch.cuda.Stream]:
    """A stream to capture on and two beside it, always the same: libraries keep memory for each."""
    return [torch.cuda.Stream(device) for _ in range(3)]
