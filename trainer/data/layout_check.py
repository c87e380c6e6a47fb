"""Check that the packs each rank has read for its first step match its place in the layout.

    rank   replica   read
    0      0         pack 0  ┐ the same batches in a replica,
    1      0         pack 0  ┘
    2      1         pack 1  ┐ other packs in another
    3      1         pack 1  ┘

The check gathers one hash per rank. It detects a wrong rank=, and sources that yield different rows
on every rank.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ...runtime import Layout, gather_objects, world_size


@dataclass(frozen=True, slots=True)
class FirstStep:
    """The packs that one rank has read for its first step."""

    replica: int
    """The number of its replica, by the layout."""
    data_rank: int
    """Its data-parallel rank, by the data set."""
    data_size: int
    pack: int
    """The index of its first pack."""
    digest: str


def check_first_step(
    layout: Layout, ranks: tuple[int, int], pack: int, batches: Iterable[dict[str, Any]]
) -> None:
    """Raise on all ranks if their packs do not match the layout; call it on every rank.

    ranks: data-parallel rank and size of the data set.
    """
    if world_size() > 1:
        own = FirstStep(layout.data_rank, *ranks, pack, digest(batches))
        fault = find_fault(gather_objects(own))
        if fault:
            raise ValueError(fault)


def find_fault(steps: list[FirstStep]) -> str | None:
    """Describe the fault in the first steps of all ranks.

    >>> find_fault([FirstStep(0, 0, 2, 0, "a"), FirstStep(1, 0, 2, 0, "a")])[:37]
    'the data-parallel ranks are [0] of 2:'
    """
    by_replica: dict[int, int] = {}
    by_data_rank: dict[int, int] = {}
    for rank, step in enumerate(steps):
        first = by_replica.setdefault(step.replica, rank)
        if (step.digest, step.data_rank) != (steps[first].digest, steps[first].data_rank):
            return (
                f"ranks {first} and {rank} train one replica of the model, but read different "
                f"batches (packs {steps[first].pack} and {step.pack}): give both the same data "
                "and the same PackedDataset(rank=)"
            )
        first = by_data_rank.setdefault(step.data_rank, rank)
        if step.digest != steps[first].digest:
            return (
                f"ranks {first} and {rank} have the same data-parallel rank {step.data_rank}, but "
                f"read different batches (packs {steps[first].pack} and {step.pack}): open the "
                "same data, in the same order, on every rank"
            )
    return _find_gap(steps)


def _find_gap(steps: list[FirstStep]) -> str | None:
    """Return whether packs are omitted, or trained by more ranks than others."""
    size, readers = steps[0].data_size, Counter(step.data_rank for step in steps)
    if size > len(steps):
        return None  # the processes of another launcher, which we do not see, read the others
    if {step.data_size for step in steps} != {size} or len(readers) != size:
        return (
            f"the data-parallel ranks are {sorted(readers)} of {size}: every one of them must "
            "read its packs; pass PackedDataset(rank=, world_size=) of the data-parallel group"
        )
    if len(set(readers.values())) > 1:
        return (
            f"the packs of some data-parallel ranks are read by more ranks than others: {readers}"
        )
    return None


def digest(batches: Iterable[dict[str, Any]]) -> str:
    """Identify the tokens and labels of batches."""
    state = hashlib.sha256()
    for batch in batches:
        for name in ("input_ids", "labels"):
            value = batch.get(name)
            if torch.is_tensor(value):
                state.update(value.cpu().contiguous().numpy().tobytes())
    return state.hexdigest()
