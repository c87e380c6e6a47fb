"""`Varlen`, `Pages`: boundaries and page tables of a call; `batch_cache`: data its layers share.

A packed training row, a prefill, a decode step and any mix of them are the same value. They differ
only in where the keys are: beside the queries, or in the pages of a cache.

    training   q [aaaa|bb|ccc]              k = the tokens of this step
    paged      q [aaaa|b|c]  + Pages        k = everything cached for a, b, c, including this step
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from .paging.cache import PagedCache


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """Where the keys and values of N sequences are, including those of this step."""

    cache: PagedCache
    """The keys and values of all layers."""
    table: Tensor
    """int32 [N, P]: the pages of each sequence, in order; entries past its length are not read."""
    lengths: Tensor
    """int32 [N]: number of keys of each sequence once those of this step are written."""
    kv_slots: Tensor
    """int64 [T]: the KV slot (page * page_size + offset) of each token of this step; -1: none."""
    max_length: int
    """An upper bound of `lengths`, on the host."""


@dataclass(frozen=True, slots=True, eq=False)
class Varlen:
    """N sequences of queries in T flat tokens; inside each, attention is aligned bottom-right."""

    cu_seqlens: Tensor
    """int32 [N+1], from 0 to T; repeated values are empty sequences."""
    max_length: int
    """An upper bound of the N query lengths, on the host."""
    pages: Pages | None = None
    """Where all keys are; None: the keys are those of this step."""
    group: Any = None
    """The process group whose ranks have equal parts of the T tokens, in order of their ranks;
    without one, all are here."""


_batches: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Batch tensor -> (its version, what was derived from it); an entry dies with its tensor."""


def batch_cache(tensor: Tensor) -> dict[str, Any]:
    """Return the dict of what was derived from a batch's tensor, for the layers after the first.

    It is empty again once the tensor was written to. Tensors without a version counter (inference
    mode), and those a CUDA graph is being captured over, get a new dict each time: a later change
    could not be noticed.
    """
    if tensor.is_inference() or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
        return {}
    entry = _batches.get(tensor)
    if entry is None or entry[0] != tensor._version:
        entry = _batches[tensor] = tensor._version, {}
    return entry[1]


def start_batch(*tensors: Tensor | None) -> None:
    """Drop what was derived from these tensors: a model's first layer starts a new batch.

    A buffer may be refilled without a new version (by a broadcast, through `.data`, by a graph
    replay). Layers that a backward pass recomputes belong to the batch they were computed in.
    """
    for tensor in tensors:
        if tensor is not None and not in_backward():
            _batches.pop(tensor, None)


def in_backward() -> bool:
    """Return whether this thread runs a backward pass, which may recompute layers."""
    return torch._C._current_graph_task_id() != -1
