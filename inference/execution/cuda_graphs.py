"""Decode steps as CUDA graphs: one launch instead of hundreds.

A graph is good for one batch size and one width of the page table, so both go up a ladder; rows
past the batch carry no request and write nowhere. It holds the attention kernels it was captured
with, so one asked for by name has graphs of its own. Graphs are captured when first needed and stay
good while the weights stay where they are: an optimizer updates them in place. Once they have taken
the memory set aside for them, a step uses the next larger graph there is, or none.

    host ─one copy─▶ ids, positions, slots, lengths, table ─▶ [ graph: model, likeliest token ]
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...attention import PagedCache, Pages, Varlen
from ...attention.backends import forced_paged_backend
from ..scheduling.step import Step
from .capture import for_capture, streams
from .gc_control import gc_disabled
from .memory_budget import is_out_of_memory
from .sampler import SamplingInputs, sample
from .transfer import pack, views

Forward = Callable[[Tensor, Tensor, Varlen, int], Tensor]
Key = tuple[str | None, int, int]
"""The attention backend asked for by name, rows, and width of the page table."""

log = logging.getLogger("nopad.inference")

SEGMENTS = 40 << 20
"""Memory comes in segments of 2 and 20 MiB: graphs take some of each, however little they keep."""
LADDER = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)


def rung(count: int) -> int:
    """The smallest size of the ladder that holds `count` rows.

    >>> [rung(n) for n in (1, 3, 100, 256, 257, 1000)]
    [1, 4, 112, 256, 320, 1024]
    """
    if count > LADDER[-1]:
        return -(-count // 64) * 64
    return LADDER[bisect_left(LADDER, count)]


def rungs(most: int) -> list[int]:
    """All sizes up to the one that holds `most` rows.

    >>> rungs(5)
    [1, 2, 4, 8]
    """
    return sorted({rung(count) for count in range(1, most + 1)})


@dataclass(frozen=True, slots=True, eq=False)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    bounds: Tensor
    """Not written again, but the graph reads it: it must live as long."""
    logits: Tensor
    tokens: Tensor


def decodes(step: Step) -> bool:
    """Whether every request of a step runs one token and yields one."""
    alike = len(step.sampled_requests) == len(step.requests) == len(step.logits_indices)
    return step.max_query_len == 1 and alike


def graph_bytes(max_num_seqs: int, vocabulary: int, itemsize: int) -> int:
    """What the graphs of all batch sizes keep: nearly all of it logits, and half-filled segments.

    >>> graph_bytes(4, 1000, 2) - SEGMENTS
    17500
    """
    return sum(rungs(max_num_seqs)) * vocabulary * itemsize * 5 // 4 + SEGMENTS


class DecodeGraphs:
    """Graphs of one model over one cache, within `room` bytes."""

    def __init__(self, cache: PagedCache, newest: Tensor, room: int):
        self._cache = cache
        self._newest = newest
        """Newest token of each slot; the last entry takes what padding yields."""
        self._room = room
        self._taken = 0
        self._captured: dict[Key, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __len__(self) -> int:
        return len(self._captured)

    def serves(self, step: Step) -> bool:
        """Whether it is a decode step, and a graph is there."""
        return decodes(step) and self._key(step) is not None

    def run(self, step: Step, forward: Forward) -> tuple[Tensor, Tensor, int] | None:
        """Replay the step: logits [N, V], likeliest tokens [N], number of padding rows.

        None where its graph did not fit the memory: no more are captured then.
        """
        count, key = len(step.requests), self._key(step)
        assert key is not None
        _, size, width = key
        arrays = _padded(step, size, width, len(self._newest) - 1)
        if key not in self._captured:
            try:
                self._captured[key] = self._capture(arrays, forward)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                self._taken = self._room
                log.warning("decode steps run without more graphs: no memory for %d rows", size)
                return None
        captured = self._captured[key]
        captured.inputs.copy_(pack(arrays)[0], non_blocking=True)
        captured.graph.replay()
        return captured.logits[:count], captured.tokens[:count], size - count

    def _key(self, step: Step) -> Key | None:
        """The graph for a step: the smallest, or the smallest there is."""
        by = forced_paged_backend()
        size = rung(len(step.requests))
        width = 4 << max(0, (step.page_table.shape[1] - 1) // 4).bit_length()
        if (by, size, width) in self._captured or self._taken < self._room:
            return by, size, width
        large = (k for k in self._captured if k[0] == by and k[1] >= size and k[2] >= width)
        return min(large, default=None)

    def _capture(self, arrays: list[np.ndarray], forward: Forward) -> _Captured:
        blank = [np.zeros_like(a) for a in arrays]
        blank[_SLOTS] -= 1
        blank[_LENGTHS] += 1
        blank[_OWNERS] += len(self._newest) - 1
        packed, places = pack(blank)
        inputs = packed.to(self._newest.device)
        parts = views(inputs, blank, places)
        width = arrays[_TABLE].shape[1]
        size = len(arrays[0])
        bounds = torch.arange(size + 1, dtype=torch.int32, device=inputs.device)

        def body() -> tuple[Tensor, Tensor]:
            ids, positions, slots, lengths, owners, table = parts
            pages = Pages(self._cache, table, lengths, slots, width * self._cache.page_size)
            logits = forward(ids, positions, Varlen(bounds, 1, pages), 0)
            tokens = sample(logits, SamplingInputs())
            self._newest.index_copy_(0, owners, tokens.clamp(min=0))
            return logits, tokens

        stream = streams(inputs.device)[0]
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with for_capture():
            with torch.cuda.stream(stream):
                body()  # what kernels and libraries do once only, they do here
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.empty_cache()  # a graph takes memory of its own, not what is cached
            before = torch.cuda.memory_reserved(inputs.device)
            # Not `torch.cuda.graph`: it waits for the device and gives back pinned memory as well.
            with torch.cuda.stream(stream), _recording(graph, self._pool):
                logits, tokens = body()
            self._taken += torch.cuda.memory_reserved(inputs.device) - before
        return _Captured(graph, inputs, bounds, logits, tokens)


@contextmanager
def _recording(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Capture what runs inside; where that fails, the reason is told, not the broken capture."""
    # What other threads do meanwhile, those of a data loader for instance, is none of its business.
    with gc_disabled():
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()


_SLOTS, _LENGTHS, _OWNERS, _TABLE = 2, 3, 4, 5


def _padded(step: Step, size: int, width: int, nobody: int) -> list[np.ndarray]:
    """The step's arrays, with rows that carry no request up to `size`."""
    count = len(step.requests)
    ids, positions, slots = (np.zeros(size, np.int64) for _ in range(3))
    ids[:count], positions[:count] = step.token_ids, step.positions
    slots[:count], slots[count:] = step.kv_slots, -1
    lengths = np.ones(size, np.int32)
    lengths[:count] = step.seq_lens
    owners = np.full(size, nobody, np.int64)
    owners[:count] = step.sampled_rows
    table = np.zeros((size, width), np.int32)
    table[:count, : step.page_table.shape[1]] = step.page_table
    return [ids, positions, slots, lengths, owners, table]
