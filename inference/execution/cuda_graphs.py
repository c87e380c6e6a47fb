"""CUDA graphs of decode steps: one launch instead of hundreds.

A graph has a fixed batch size and page-table width. Both are rounded up to a few sizes, and padding
rows write nowhere. A graph also holds the attention kernels it was captured with, so every backend
forced by name has its own graphs. Graphs are captured on first use and stay valid while the weights
keep their addresses: an optimizer updates them in place. Once the graphs have used up their memory
budget, a step runs in the next larger captured graph, or without one.

    host ─one copy─▶ ids, positions, KV slots, lengths, page table ─▶ [ graph: model, argmax ]
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
from .capture import capture_mode, capture_streams
from .gc_control import gc_disabled
from .memory_budget import is_out_of_memory
from .sampler import SamplingInputs, sample
from .transfer import pack_arrays, unpack_views

Forward = Callable[[Tensor, Tensor, Varlen, int], Tensor]
Key = tuple[str | None, int, int]
"""Attention backend forced by name, batch size, width of the page table."""

log = logging.getLogger("nopad.inference")

SEGMENT_BYTES = 40 << 20
"""Allowance for partly used allocator segments, which are 2 and 20 MiB each."""
CAPTURE_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)


def capture_size(batch_size: int) -> int:
    """Return the smallest capture size that holds `batch_size` rows; multiples of 64 above 256.

    >>> [capture_size(n) for n in (1, 3, 100, 256, 257, 1000)]
    [1, 4, 112, 256, 320, 1024]
    """
    if batch_size > CAPTURE_SIZES[-1]:
        return -(-batch_size // 64) * 64
    return CAPTURE_SIZES[bisect_left(CAPTURE_SIZES, batch_size)]


def capture_sizes(max_batch_size: int) -> list[int]:
    """Return all capture sizes up to the one that holds `max_batch_size` rows.

    >>> capture_sizes(5)
    [1, 2, 4, 8]
    """
    return sorted({capture_size(count) for count in range(1, max_batch_size + 1)})


@dataclass(frozen=True, slots=True, eq=False)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    cu_seqlens: Tensor
    """Constant, but the graph reads it: it must live as long as the graph."""
    logits: Tensor
    tokens: Tensor


def is_decode_only(step: Step) -> bool:
    """Return whether every request of a step runs one token and samples one."""
    alike = len(step.sampled_requests) == len(step.requests) == len(step.logits_indices)
    return step.max_query_len == 1 and alike


def graph_bytes(max_num_seqs: int, vocab_size: int, itemsize: int) -> int:
    """Estimate the memory of graphs of all batch sizes: mostly logits, and partly used segments.

    >>> graph_bytes(4, 1000, 2) - SEGMENT_BYTES
    17500
    """
    return sum(capture_sizes(max_num_seqs)) * vocab_size * itemsize * 5 // 4 + SEGMENT_BYTES


class DecodeGraphs:
    """Graphs of one model over one KV cache, within `byte_budget`."""

    def __init__(self, cache: PagedCache, last_tokens: Tensor, byte_budget: int):
        self._cache = cache
        self._last_tokens = last_tokens
        """Last token of each batch row; the final entry receives the tokens of padding rows."""
        self._byte_budget = byte_budget
        self._used_bytes = 0
        self._captured: dict[Key, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __len__(self) -> int:
        return len(self._captured)

    def can_run(self, step: Step) -> bool:
        """Return whether a step is decode-only and a graph is captured, or can be, for its size."""
        return is_decode_only(step) and self._key(step) is not None

    def run(self, step: Step, forward: Forward) -> tuple[Tensor, Tensor, int] | None:
        """Replay the step: logits [N, V], argmax tokens [N], number of padding rows.

        Return None if capturing ran out of memory; no more graphs are captured then.
        """
        count, key = len(step.requests), self._key(step)
        assert key is not None
        _, size, width = key
        arrays = _padded(step, size, width, len(self._last_tokens) - 1)
        if key not in self._captured:
            try:
                self._captured[key] = self._capture(arrays, forward)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                self._used_bytes = self._byte_budget
                log.warning(
                    "out of memory while capturing a CUDA graph of %d rows: decode steps run "
                    "without more graphs",
                    size,
                )
                return None
        captured = self._captured[key]
        captured.inputs.copy_(pack_arrays(arrays)[0], non_blocking=True)
        captured.graph.replay()
        return captured.logits[:count], captured.tokens[:count], size - count

    def _key(self, step: Step) -> Key | None:
        """Return the smallest graph for a step; without budget, the smallest captured one."""
        backend = forced_paged_backend()
        size = capture_size(len(step.requests))
        width = 4 << max(0, (step.page_table.shape[1] - 1) // 4).bit_length()
        if (backend, size, width) in self._captured or self._used_bytes < self._byte_budget:
            return backend, size, width
        large = (k for k in self._captured if k[0] == backend and k[1] >= size and k[2] >= width)
        return min(large, default=None)

    def _capture(self, arrays: list[np.ndarray], forward: Forward) -> _Captured:
        blank = [np.zeros_like(a) for a in arrays]
        blank[_KV_SLOTS] -= 1
        blank[_SEQ_LENS] += 1
        blank[_ROWS] += len(self._last_tokens) - 1
        packed, offsets = pack_arrays(blank)
        inputs = packed.to(self._last_tokens.device)
        views = unpack_views(inputs, blank, offsets)
        width = arrays[_TABLE].shape[1]
        size = len(arrays[0])
        cu_seqlens = torch.arange(size + 1, dtype=torch.int32, device=inputs.device)

        def body() -> tuple[Tensor, Tensor]:
            ids, positions, kv_slots, seq_lens, rows, table = views
            pages = Pages(self._cache, table, seq_lens, kv_slots, width * self._cache.page_size)
            logits = forward(ids, positions, Varlen(cu_seqlens, 1, pages), 0)
            tokens = sample(logits, SamplingInputs())
            self._last_tokens.index_copy_(0, rows, tokens.clamp(min=0))
            return logits, tokens

        stream = capture_streams(inputs.device)[0]
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with capture_mode():
            with torch.cuda.stream(stream):
                body()  # warm-up: kernels and libraries do their one-time work here
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.empty_cache()  # a graph allocates from its own pool, not from cached blocks
            before = torch.cuda.memory_reserved(inputs.device)
            # Not `torch.cuda.graph`: it also synchronizes the device and frees pinned memory.
            with torch.cuda.stream(stream), _capture_into(graph, self._pool):
                logits, tokens = body()
            self._used_bytes += torch.cuda.memory_reserved(inputs.device) - before
        return _Captured(graph, inputs, cu_seqlens, logits, tokens)


@contextmanager
def _capture_into(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Capture the block; if it fails, raise its error, not that of the broken capture."""
    # thread_local: CUDA calls of other threads, such as a data loader's, do not end the capture.
    with gc_disabled():
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()


_KV_SLOTS, _SEQ_LENS, _ROWS, _TABLE = 2, 3, 4, 5


def _padded(step: Step, size: int, width: int, padding_row: int) -> list[np.ndarray]:
    """Return the step's arrays, padded to `size` rows."""
    count = len(step.requests)
    ids, positions, kv_slots = (np.zeros(size, np.int64) for _ in range(3))
    ids[:count], positions[:count] = step.token_ids, step.positions
    kv_slots[:count], kv_slots[count:] = step.kv_slots, -1
    seq_lens = np.ones(size, np.int32)
    seq_lens[:count] = step.seq_lens
    rows = np.full(size, padding_row, np.int64)
    rows[:count] = step.sampled_rows
    table = np.zeros((size, width), np.int32)
    table[:count, : step.page_table.shape[1]] = step.page_table
    return [ids, positions, kv_slots, seq_lens, rows, table]
