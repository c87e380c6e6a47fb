"""Capture and replay steps as CUDA graphs: one launch instead of hundreds.

A graph has a fixed shape (`graph_shape.py`). It also holds the attention kernels it was captured
with, so every backend forced by name has its own graphs. Graphs are captured on first use; where
latency matters, those of short requests before the first step. They stay valid while the weights
keep their addresses: an optimizer updates them in place. Once the graphs have used up their memory
budget, a step runs in the next larger captured graph, or without one.

    host ─one copy─▶ ids, positions, KV slots, lengths, page table ─▶ [ graph: model, argmax ]

The graphs of mixed steps share one buffer for their logits: what a replay leaves there is read
before the next one starts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from ...attention import PagedCache, Pages, Varlen
from ...attention.backends import NotCapturable, forced_paged_backend
from ...attention.hf import StatePool
from ...runtime import is_out_of_memory, rank
from ..live_model.weights_version import AdapterState
from ..metrics.stats import Stats
from ..scheduling.speculation import MAX_LOGIT_ROWS
from ..scheduling.step import Step
from .capture import capture_mode, capture_streams
from .gc_control import gc_disabled
from .graph_shape import (
    MIXED_TOKENS,
    GraphShape,
    blank_arrays,
    capture_sizes,
    mixed_seqs,
    pad_step,
    shapes_ahead,
    step_shape,
)
from .sampler import SamplingInputs, sample
from .transfer import StepBuffers, pack_arrays, unpack_views

try:
    from ...kernels import argmax_into, copy_words
except ImportError:  # Triton is not installed
    argmax_into = copy_words = None

Forward = Callable[[Tensor, Tensor, Varlen, Tensor | int], Tensor]

log = logging.getLogger("nopad.inference")

SEGMENT_BYTES = 40 << 20
"""Allowance for partly used allocator segments, which are 2 and 20 MiB each."""
_WIDTHS_PER_LAYER = 24
"""Hidden states that a layer has at once, an MLP's wider ones included."""


@dataclass(frozen=True, slots=True, eq=False)
class _Captured:
    inputs: Tensor
    graph: torch.cuda.CUDAGraph
    logits: Tensor
    tokens: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """What a replay of R rows leaves; the next one overwrites the tensors."""

    logits: Tensor
    """[R, V]."""
    tokens: Tensor
    """int64 [R]: their argmax."""
    num_padding: int
    """Tokens that fill the step up to the shape of its graph."""
    read_tokens: Callable[[int], np.ndarray] | None
    """Wait for the step, and read its first tokens; None: copy them to the host."""


def graph_bytes(max_num_seqs: int, vocab_size: int, hidden_size: int, itemsize: int) -> int:
    """Estimate the memory of graphs of all shapes: logits, activations, partly used segments.

    Decode graphs keep their logits each. Mixed graphs share a buffer and their activations.

    >>> graph_bytes(4, 1000, 16, 2) - SEGMENT_BYTES
    3227228
    """
    decode_logits = sum(capture_sizes(max_num_seqs)) * vocab_size * itemsize * 5 // 4
    mixed_logits = 2 * mixed_seqs(max_num_seqs) * vocab_size * itemsize
    activations = MIXED_TOKENS[-1] * hidden_size * _WIDTHS_PER_LAYER * itemsize
    return decode_logits + mixed_logits + activations + SEGMENT_BYTES


class GraphReplays:
    """Run steps as CUDA graphs where they can be, over graphs that are dropped when they expire."""

    def __init__(
        self,
        cache: PagedCache,
        last_tokens: Tensor,
        byte_budget: int,
        max_model_len: int,
        tokens_ahead: int,
        stats: Stats,
        states: StatePool | None,
    ):
        """Start without a graph.

        byte_budget: memory for graphs, 0 for none.
        tokens_ahead: capture the graphs of prefill steps up to this size before the first step.
        """
        self._new_graphs = lambda: StepGraphs(
            cache, last_tokens, byte_budget, max_model_len, states
        )
        self._graphs = self._new_graphs() if byte_budget else None
        self._tokens_ahead = tokens_ahead
        self._stats = stats
        self.may_capture = True
        """Whether forwards can be captured and replayed now; a collective in them cannot."""
        self.adapters: AdapterState = []
        """Which adapters are active now; graphs hold those that were active at capture."""
        self._captured_adapters: AdapterState = []
        self._uncapturable: set[str | None] = set()
        """Attention backends, as forced by name, whose calls cannot be captured."""

    def __len__(self) -> int:
        return 0 if self._graphs is None else len(self._graphs)

    @property
    def enabled(self) -> bool:
        """Whether steps may run as CUDA graphs."""
        return self._graphs is not None

    @property
    def step_sizes(self) -> Sequence[int]:
        """Token counts of the graphs of prefill steps; empty if such steps run without a graph."""
        return self._graphs.mixed_sizes() if self._graphs is not None and self._may_replay() else ()

    def replay(self, step: Step, forward: Forward) -> Replayed | None:
        """Run a step as a CUDA graph; None if it cannot be one."""
        if self._graphs is None or not self._may_replay():
            return None
        began, captured = perf_counter(), len(self._graphs)
        try:
            if self._tokens_ahead:  # only before the first step: later, running requests would wait
                max_num_tokens, self._tokens_ahead = self._tokens_ahead, 0
                self._captured_adapters = self.adapters
                self._graphs.capture_ahead(forward, max_num_tokens)
            if not self._graphs.can_run(step):
                return None
            if self._captured_adapters != self.adapters:
                self.drop()
                captured = 0
            self._captured_adapters = self.adapters  # comparing the same object is fast next time
            return self._graphs.run(step, forward)
        except NotCapturable as reason:
            self._uncapturable.add(forced_paged_backend())
            log.warning("steps run without CUDA graphs: %s", reason)
            return None
        finally:
            if len(self._graphs) > captured:
                self._stats.capture_seconds += perf_counter() - began

    def drop(self) -> None:
        """Drop captured graphs: the weights have moved, or the adapters have changed."""
        if self._graphs is not None:
            self._graphs = self._new_graphs()

    def _may_replay(self) -> bool:
        return self.may_capture and forced_paged_backend() not in self._uncapturable


class StepGraphs:
    """Graphs of one model over one KV cache, within `byte_budget`."""

    def __init__(
        self,
        cache: PagedCache,
        last_tokens: Tensor,
        byte_budget: int,
        max_model_len: int,
        states: StatePool | None = None,
    ):
        self._cache = cache
        self._states = states
        self._last_tokens = last_tokens
        """Last token of each batch row; the final entry receives the tokens of padding rows."""
        self._byte_budget = byte_budget
        self._max_model_len = max_model_len
        self._used_bytes = 0
        self._captured: dict[GraphShape, _Captured] = {}
        self._captures_mixed = states is None  # prompts run one by one through recurrent layers
        self._logits: Tensor | None = None
        """Logits of mixed steps, [rows, V]."""
        self._pool = torch.cuda.graph_pool_handle()
        self._buffers = StepBuffers(last_tokens.device, max(len(last_tokens), MAX_LOGIT_ROWS))
        self._by_kernels = last_tokens.is_cuda and copy_words is not None
        """Whether kernels copy inputs and tokens."""

    def __len__(self) -> int:
        return len(self._captured)

    def mixed_sizes(self) -> Sequence[int]:
        """Return the token counts, ascending, of prefill graphs that exist or may be captured.

        Without budget, only those of captured graphs.
        """
        if not self._captures_mixed:
            return ()
        if self._used_bytes < self._byte_budget:
            return MIXED_TOKENS
        return sorted({shape.num_tokens for shape in self._captured if shape.mixed})

    def can_run(self, step: Step) -> bool:
        """Return whether a graph is captured, or can be, for a step's shape."""
        return self._shape(step) is not None

    def run(self, step: Step, forward: Forward) -> Replayed | None:
        """Replay the step.

        Return None if capturing ran out of memory; no more graphs are captured then.
        """
        shape, count = self._shape(step), len(step.logits_indices)
        assert shape is not None
        if not self._ensure(shape, forward):
            return None
        captured, slot = self._captured[shape], self._buffers.next_slot()
        packed = self._buffers.pack(slot, pad_step(step, shape, len(self._last_tokens) - 1, slot))
        if self._by_kernels:
            assert copy_words is not None
            copy_words(packed.view(torch.int64), captured.inputs.view(torch.int64))
        else:
            captured.inputs.copy_(packed, non_blocking=True)
        captured.graph.replay()
        read_tokens = self._buffers.launched(slot)
        return Replayed(
            captured.logits[:count],
            captured.tokens[:count],
            shape.num_tokens - len(step.token_ids),
            read_tokens if self._by_kernels else None,
        )

    def capture_ahead(self, forward: Forward, max_num_tokens: int) -> None:
        """Capture the graphs of short requests, so that none waits for a capture."""
        max_pages = -(-self._max_model_len // self._cache.page_size)
        shapes = shapes_ahead(len(self._last_tokens) - 1, max_num_tokens, max_pages)
        shapes = list(dict.fromkeys(map(self._padded, shapes)))
        off = rank() > 0 or None  # None: only in a terminal
        for shape in tqdm(shapes, "nopad: capturing CUDA graphs", leave=False, disable=off):
            # A quarter is for decodes of longer requests, captured when they come.
            limit = self._byte_budget if shape.mixed else self._byte_budget * 3 // 4
            if shape.mixed and not self._captures_mixed:
                continue
            if self._used_bytes >= limit or not self._ensure(shape, forward):
                break

    def _ensure(self, shape: GraphShape, forward: Forward) -> bool:
        """Capture a shape unless it is captured; False, with a warning, if it cannot be."""
        if shape in self._captured:
            return True
        try:
            self._captured[shape] = self._capture(shape, forward)
            return True
        except NotCapturable:
            raise
        except RuntimeError as error:
            if is_out_of_memory(error):
                self._used_bytes = self._byte_budget
                reason = "out of memory: no more graphs are captured"
            elif shape.mixed:  # a model may look at the tokens of a prompt, and not at decodes
                self._captures_mixed = False
                reason = f"steps with prompts run without graphs ({error})"
            elif self._states is not None:
                raise NotCapturable(
                    f"a layer with a state looks at its tokens ({error})"
                ) from error
            else:
                raise
            log.warning("CUDA graph of %d tokens: %s", shape.num_tokens, reason)
            return False

    def _shape(self, step: Step) -> GraphShape | None:
        """Return the smallest graph for a step; without budget, the smallest captured one."""
        shape = step_shape(step)
        if shape is None or (shape.mixed and not self._captures_mixed):
            return None
        if self._states is not None and step.seq_lens.min() == 1:  # a state starts
            return None
        shape = self._padded(shape)
        if shape in self._captured or self._used_bytes < self._byte_budget:
            return shape
        return min((large for large in self._captured if large.holds(shape)), default=None)

    def _padded(self, shape: GraphShape) -> GraphShape:
        """Return a shape of two rows for one: torch.compile would compile layers for it alone."""
        if self._states is None or shape.num_tokens > 1:
            return shape
        return shape._replace(num_tokens=2, num_seqs=2)

    def _capture(self, shape: GraphShape, forward: Forward) -> _Captured:
        blank = blank_arrays(shape, len(self._last_tokens) - 1)
        packed, offsets = pack_arrays(blank, pinned=False)
        inputs = packed.to(self._last_tokens.device)
        views = unpack_views(inputs, blank, offsets)
        max_length = min(shape.width * self._cache.page_size, self._max_model_len)

        def body() -> tuple[Tensor, Tensor]:
            ids, positions, kv_slots, seq_lens, rows, table, cu_seqlens, indices, slot = views
            pages = Pages(self._cache, table, seq_lens, kv_slots, max_length)
            varlen = Varlen(cu_seqlens, shape.num_tokens if shape.mixed else 1, pages)
            with nullcontext() if self._states is None else self._states.decode(rows):
                logits = forward(ids, positions, varlen, indices if shape.mixed else 0)
            tokens = self._keep_argmax(logits, rows, slot)
            return (self._share(logits) if shape.mixed else logits), tokens

        with capture_mode():
            return _Captured(inputs, *self._record(body, frees_cache=not shape.mixed))

    def _record(
        self, body: Callable[[], tuple[Tensor, Tensor]], frees_cache: bool
    ) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        """Record what `body` launches; return the graph and the body's outputs.

        frees_cache: give cached memory back first, since a graph allocates from its own pool. It
            takes time, and mixed graphs share what the first of them has allocated.
        """
        device = self._last_tokens.device
        stream, graph = capture_streams(device)[0], torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            body()  # warm-up: kernels and libraries do their one-time work here
        torch.cuda.current_stream().wait_stream(stream)
        if frees_cache:
            torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(device)
        # Not `torch.cuda.graph`: it also synchronizes the device and frees pinned memory.
        with torch.cuda.stream(stream), _capture_into(graph, self._pool):
            logits, tokens = body()
        self._used_bytes += torch.cuda.memory_reserved(device) - before
        return graph, logits, tokens

    def _keep_argmax(self, logits: Tensor, rows: Tensor, slot: Tensor) -> Tensor:
        """Take each row's most likely token; keep it for the next step, and for the host."""
        if self._by_kernels:
            assert argmax_into is not None
            return argmax_into(logits, rows, self._last_tokens, slot, self._buffers.tokens)
        tokens = sample(logits, SamplingInputs())
        self._last_tokens.index_copy_(0, rows, tokens.clamp(min=0))
        return tokens

    def _share(self, logits: Tensor) -> Tensor:
        """Copy logits to the buffer that all mixed graphs share."""
        if self._logits is None or len(self._logits) < len(logits):
            self._logits = torch.empty_like(logits)  # in the warm-up; earlier graphs keep theirs
        return self._logits[: len(logits)].copy_(logits)


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
