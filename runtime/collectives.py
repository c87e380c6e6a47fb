"""Exchange values between the ranks of a run: sums, Python objects, and errors.

`all_ranks_or_none` is for work that each rank does alone before the next collective. Without it, a
rank that raises would leave the others waiting forever in the next collective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from .host_copy import to_device
from .layout import Layout
from .ranks import world_size

T = TypeVar("T")


class RankError(RuntimeError):
    """Another rank failed; its message names the rank and the error."""


def sum_over_ranks(value: float | torch.Tensor) -> torch.Tensor:
    """Return the sum over all ranks, on the device of the process group, without a host sync."""
    device = "cuda" if world_size() > 1 and "nccl" in dist.get_backend() else "cpu"
    if not torch.is_tensor(value):
        value = torch.tensor(float(value), dtype=torch.float64)
    total = to_device(value.to(torch.float64, copy=True), device)
    if world_size() > 1:
        dist.all_reduce(total)
    return total


def gather_objects(value: T) -> list[T]:
    """Return the values of all ranks, ordered by rank, on every rank."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def join_sequence_group(layout: Layout) -> Any:
    """Return the process group of the ranks that share this rank's rows; None if none do.

    Call it on every rank, once per run: it creates the groups of all ranks.
    """
    if layout.sequence.size == 1:
        return None
    groups = {tuple(layout.sequence.group(rank)) for rank in range(layout.world_size)}
    created = {ranks: dist.new_group(list(ranks)) for ranks in sorted(groups)}
    return created[tuple(layout.sequence.group(layout.rank))]


def barrier() -> None:
    """Wait until every rank has called this."""
    if world_size() > 1:
        dist.barrier()


def all_ranks_or_none(work: Callable[[], T]) -> list[T]:
    """Run `work` and return the results of all ranks; an error on one rank is raised on all.

    A rank that failed raises its own error, the others a `RankError`. Ctrl-C and exits on one rank
    keep their type on all ranks.

    >>> all_ranks_or_none(lambda: 2 + 2)
    [4]
    """
    if world_size() == 1:
        return [work()]
    result, error = None, None
    try:
        result = work()
    except BaseException as raised:  # the other ranks must know about it
        error = raised
    message = None if error is None else f"{type(error).__name__}: {error}"
    exits = error is not None and not isinstance(error, Exception)
    outcomes = gather_objects((result, message, exits))
    failures = [(r, text, left) for r, (_, text, left) in enumerate(outcomes) if text is not None]
    if failures:
        _raise_everywhere(failures, error)
    return [value for value, *_ in outcomes]  # pyright: ignore[reportReturnType]


def _raise_everywhere(failures: list[tuple[int, str, bool]], own: BaseException | None) -> NoReturn:
    exits = [(failed, message) for failed, message, left in failures if left]
    if any(message.startswith("KeyboardInterrupt") for _, message in exits):
        raise KeyboardInterrupt
    if exits and (own is None or isinstance(own, Exception)):
        failed, message = exits[0]
        raise SystemExit(f"rank {failed} exited: {message}")
    if own is not None:
        raise own
    failed, message, _ = failures[0]
    raise RankError(f"rank {failed} failed: {message}")
